// SPDX-License-Identifier: Apache-2.0

// The checker of attention gradients, on arrays and on files. Reports travel as
// the JSON that `fa2 verify --json` writes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/src/array.h"
#include "python/src/call.h"
#include "src/verify/cases/case_file.h"
#include "src/verify/cases/error.h"
#include "src/verify/cases/names.h"
#include "src/verify/cases/shards.h"
#include "src/verify/judge/check.h"
#include "src/verify/judge/report.h"

namespace fa2::python {
namespace {

// JSON, text and HTML.
using Report = std::tuple<std::string, std::string, std::string>;

// Where the cases of one rank, or of all, come from: a path, or arrays by name
// by case.
class Sources {
 public:
  // Throws verify::Error.
  void Add(const nb::handle source, const std::string& options) {
    std::vector<verify::Case> cases;
    if (nb::isinstance<nb::str>(source)) {
      verify::ReadOptionsOfFile read;
      read.overrides = options;
      cases = verify::ReadCases(nb::str(source).c_str(), read);
    } else {
      const auto by_case = nb::cast<nb::dict>(source);
      for (const nb::handle name : by_case.keys()) {
        cases.push_back(CaseOf(nb::cast<nb::dict>(by_case[name]), options,
                               nb::str(name).c_str()));
      }
    }
    ranks_.push_back(std::move(cases));
  }

  // One source as it is; several as the ranks of one run.
  std::vector<verify::Case> Join(const std::string& shard_by) const {
    if (ranks_.size() == 1) return ranks_.front();
    const verify::ShardBy by = verify::ShardByNamed(shard_by);
    std::vector<verify::Case> joined;
    for (size_t n = 0; n < ranks_.front().size(); ++n) {
      std::vector<verify::Case> pieces;
      for (const std::vector<verify::Case>& rank : ranks_) {
        if (n >= rank.size() || rank[n].name != ranks_.front()[n].name) {
          throw verify::Error("the ranks hold different cases");
        }
        pieces.push_back(rank[n]);
      }
      joined.push_back(verify::JoinShards(pieces, by));
    }
    return joined;
  }

 private:
  // `tensors`: names to dense arrays of at most 4 dimensions.
  verify::Case CaseOf(const nb::dict& tensors, const std::string& options,
                      const std::string& name) {
    verify::Case c;
    c.name = name;
    for (const nb::handle key : tensors.keys()) {
      const std::string given = nb::str(key).c_str();
      const nb::object value = tensors[key];
      const std::string canonical = verify::CanonicalName(given);
      if (canonical.empty() || value.is_none()) continue;
      owners_.emplace_back(given.c_str(), value);
      const InputArray& array = owners_.back();
      verify::Array plain;
      plain.dtype = array.dtype();
      plain.shape = array.shape();
      plain.data = array.Leading().data;
      c.tensors[canonical] = plain;
    }
    verify::ReadOptions(options, "", &c.options);
    return c;
  }

  std::list<InputArray> owners_;
  std::vector<std::vector<verify::Case>> ranks_;
};

Report Verify(const nb::list& sources, const std::string& options,
              const std::string& shard_by, bool plain, bool diagnose,
              int threads) {
  std::string error;
  Report report;
  Sources ranks;
  try {
    for (const nb::handle source : sources) ranks.Add(source, options);
    const nb::gil_scoped_release release;
    verify::CheckOptions check;
    check.plain = plain;
    check.diagnose = diagnose;
    check.threads = threads;
    std::vector<verify::CaseReport> reports;
    for (const verify::Case& c : ranks.Join(shard_by)) {
      reports.push_back(verify::Check(c, check));
      std::get<1>(report) += verify::ReportText(reports.back());
    }
    std::get<0>(report) = verify::ReportJson(reports);
    std::get<2>(report) = verify::ReportHtml(reports);
  } catch (const verify::Error& e) {
    error = e.what();
  }
  if (!error.empty()) throw nb::value_error(error.c_str());
  return report;
}

}  // namespace

void BindVerify(nb::module_& module) {
  using namespace nanobind::literals;  // NOLINT: the argument names
  module.def("verify", &Verify, "sources"_a, "options"_a, "shard_by"_a,
             "plain"_a, "diagnose"_a, "threads"_a);
  module.def(
      "verify_tensor_name",
      [](const std::string& name) { return verify::CanonicalName(name); },
      "name"_a);
}

}  // namespace fa2::python
