// SPDX-License-Identifier: Apache-2.0

// The checker of attention gradients, on arrays and on files. Reports travel as
// the JSON that `fa2 verify --json` writes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>
#include <vector>

#include "python/src/array.h"
#include "python/src/call.h"
#include "src/verify/case_file.h"
#include "src/verify/check.h"
#include "src/verify/error.h"
#include "src/verify/report.h"

namespace fa2::python {
namespace {

// JSON and text.
using Report = std::pair<std::string, std::string>;

template <class F>
Report Judge(const F& read, bool plain, bool diagnose, int threads) {
  std::string error;
  Report report;
  {
    const nb::gil_scoped_release release;
    try {
      verify::CheckOptions options;
      options.plain = plain;
      options.diagnose = diagnose;
      options.threads = threads;
      std::vector<verify::CaseReport> reports;
      for (const verify::Case& c : read()) {
        reports.push_back(verify::Check(c, options));
        report.second += verify::ReportText(reports.back());
      }
      report.first = verify::ReportJson(reports);
    } catch (const verify::Error& e) {
      error = e.what();
    }
  }
  if (!error.empty()) throw nb::value_error(error.c_str());
  return report;
}

// `tensors`: names to dense arrays of at most 4 dimensions.
verify::Case CaseOf(const nb::dict& tensors, const std::string& options,
                    const std::string& name, std::vector<InputArray>* owners) {
  verify::Case c;
  c.name = name;
  for (const nb::handle key : tensors.keys()) {
    const std::string given = nb::str(key).c_str();
    const nb::object value = tensors[key];
    const std::string canonical = verify::CanonicalName(given);
    if (canonical.empty() || value.is_none()) continue;
    owners->emplace_back(given.c_str(), value);
    const InputArray& array = owners->back();
    verify::Array plain;
    plain.dtype = array.dtype();
    plain.shape = array.shape();
    plain.data = array.Leading().data;
    c.tensors[canonical] = plain;
  }
  verify::ReadOptions(options, "", &c.options);
  return c;
}

Report VerifyTensors(const nb::dict& tensors, const std::string& options,
                     const std::string& name, bool plain, bool diagnose,
                     int threads) {
  std::vector<InputArray> owners;
  owners.reserve(tensors.size());
  verify::Case c;
  try {
    c = CaseOf(tensors, options, name, &owners);
  } catch (const verify::Error& e) {
    throw nb::value_error(e.what());
  }
  return Judge([&] { return std::vector<verify::Case>{c}; }, plain, diagnose,
               threads);
}

Report VerifyFile(const std::string& path, const std::string& options,
                  bool plain, bool diagnose, int threads) {
  return Judge(
      [&] {
        verify::ReadOptionsOfFile read;
        read.overrides = options;
        return verify::ReadCases(path, read);
      },
      plain, diagnose, threads);
}

}  // namespace

void BindVerify(nb::module_& module) {
  using namespace nanobind::literals;  // NOLINT: the argument names
  module.def("verify_tensors", &VerifyTensors, "tensors"_a, "options"_a,
             "name"_a, "plain"_a, "diagnose"_a, "threads"_a);
  module.def("verify_file", &VerifyFile, "path"_a, "options"_a, "plain"_a,
             "diagnose"_a, "threads"_a);
  module.def(
      "verify_tensor_name",
      [](const std::string& name) { return verify::CanonicalName(name); },
      "name"_a);
}

}  // namespace fa2::python
