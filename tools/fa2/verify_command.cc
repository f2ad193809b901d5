// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "src/verify/cases/case_file.h"
#include "src/verify/cases/error.h"
#include "src/verify/cases/names.h"
#include "src/verify/cases/shards.h"
#include "src/verify/judge/check.h"
#include "src/verify/judge/report.h"
#include "tools/fa2/command.h"
#include "tools/fa2/option_flags.h"

namespace fa2::tool {
namespace {

using verify::Case;
using verify::CaseReport;
using verify::Error;

struct Arguments {
  std::string file, candidate, json, html, shard_by = "sequence";
  std::vector<std::string> cases, repeats, maps, shards;
  bool plain = false, quiet = false, no_diagnosis = false;
  int threads = 0;
  OptionFlags options;
};

// Reads the files of one command. A name that --map gives must be in one of
// them: inputs may be in one, outputs in another.
class Reader {
 public:
  explicit Reader(const Arguments& a) : options_(OptionsOf(a)) {
    options_.found = &found_;
  }

  std::vector<Case> Read(const std::string& path) {
    files_ += (files_.empty() ? "" : ", ") + path;
    return verify::ReadCases(path, options_);
  }

  void RequireNames() const {
    for (const auto& [canonical, name] : options_.names) {
      if (found_.count(canonical) != 0) continue;
      throw Error(files_ + ": no tensor is named " + name + ", which --map " +
                  canonical + "=" + name + " names");
    }
  }

 private:
  static verify::ReadOptionsOfFile OptionsOf(const Arguments& a);

  verify::ReadOptionsOfFile options_;
  std::set<std::string> found_;
  std::string files_;
};

verify::ReadOptionsOfFile Reader::OptionsOf(const Arguments& a) {
  verify::ReadOptionsOfFile options;
  options.overrides = a.options.Json();
  for (const std::string& map : a.maps) {
    const size_t equals = map.find('=');
    if (equals == std::string::npos || equals == 0 ||
        equals + 1 == map.size()) {
      throw Error("--map is " + map + ", it must be NAME=THE_FILE'S_NAME");
    }
    const std::string name = map.substr(0, equals);
    if (verify::CanonicalName(name) != name) {
      throw Error("--map is " + map + ", and " + name +
                  " is no name of a tensor (q, k, v, dout, out, lse, dq, …)");
    }
    options.names[name] = map.substr(equals + 1);
  }
  return options;
}

// The file that sentences name.
const std::string& Source(const Arguments& a) {
  return a.shards.empty() ? a.file : a.shards.front();
}

// The case of that name; where one case is judged and the other file holds one,
// that one.
const Case* Find(const std::vector<Case>& cases, const std::string& name,
                 bool alone) {
  for (const Case& c : cases) {
    if (c.name == name) return &c;
  }
  return alone && cases.size() == 1 ? &cases.front() : nullptr;
}

// The files of a distributed run's ranks as one; with `inputs`, they hold
// outputs of these cases alone.
std::vector<Case> ReadShards(const Arguments& a,
                             const std::vector<Case>* inputs, Reader* reader) {
  const verify::ShardBy by = verify::ShardByNamed(a.shard_by);
  std::vector<std::vector<Case>> ranks;
  for (const std::string& path : a.shards) ranks.push_back(reader->Read(path));
  std::vector<Case> joined;
  for (const Case& first : inputs != nullptr ? *inputs : ranks.front()) {
    std::vector<Case> pieces;
    for (size_t r = 0; r < ranks.size(); ++r) {
      const Case* piece = Find(ranks[r], first.name, ranks[0].size() == 1);
      if (piece == nullptr) {
        throw Error(a.shards[r] + ": there is no case " + first.name);
      }
      pieces.push_back(*piece);
      if (inputs != nullptr) pieces.back().options = first.options;
    }
    joined.push_back(verify::JoinShards(pieces, by));
    if (inputs != nullptr) {
      joined.back() = verify::Combine(first, joined.back());
    }
  }
  return joined;
}

std::vector<Case> WithCandidate(const std::vector<Case>& cases,
                                const Arguments& a, Reader* reader) {
  const std::vector<Case> outputs = reader->Read(a.candidate);
  std::vector<Case> combined;
  for (const Case& c : cases) {
    const Case* other = Find(outputs, c.name, cases.size() == 1);
    if (other != nullptr) combined.push_back(verify::Combine(c, *other));
  }
  if (combined.empty()) {
    throw Error(a.candidate + ": no case in it has a name of a case in " +
                a.file);
  }
  return combined;
}

// Those that --case names; without it all.
std::vector<Case> Selected(const std::vector<Case>& cases, const Arguments& a) {
  if (a.cases.empty()) return cases;
  std::vector<Case> selected;
  for (const std::string& name : a.cases) {
    const Case* c = Find(cases, name, false);
    if (c == nullptr) throw Error(Source(a) + ": there is no case " + name);
    selected.push_back(*c);
  }
  return selected;
}

std::vector<Case> CasesToJudge(const Arguments& a, Reader* reader) {
  if (a.file.empty() && a.shards.empty()) {
    throw Error("verify takes FILE, or --shards FILE..., or both");
  }
  if (!a.candidate.empty() && !a.shards.empty()) {
    throw Error("verify takes CANDIDATE or --shards, not both");
  }
  if (a.file.empty()) return Selected(ReadShards(a, nullptr, reader), a);
  std::vector<Case> cases = Selected(reader->Read(a.file), a);
  if (!a.shards.empty()) cases = ReadShards(a, &cases, reader);
  if (!a.candidate.empty()) cases = WithCandidate(cases, a, reader);
  return cases;
}

int Run(const Arguments& a) {
  Reader reader(a);
  const std::vector<Case> cases = CasesToJudge(a, &reader);
  std::vector<std::vector<Case>> repeats;
  for (const std::string& path : a.repeats) {
    repeats.push_back(reader.Read(path));
  }
  reader.RequireNames();
  verify::CheckOptions options;
  options.plain = a.plain;
  options.threads = a.threads;
  options.diagnose = !a.no_diagnosis;
  std::vector<CaseReport> reports;
  const bool progress = !a.quiet && isatty(2) != 0;
  for (size_t n = 0; n < cases.size(); ++n) {
    if (progress) {
      options.progress = [&](const std::string& what) {
        fmt::print(stderr, "\r\033[K{}/{} {}: {} ", n + 1, cases.size(),
                   cases[n].name, what);
      };
    }
    CaseReport report;
    try {
      report = verify::Check(cases[n], options);
      for (size_t r = 0; r < repeats.size(); ++r) {
        const Case* other = Find(repeats[r], cases[n].name, cases.size() == 1);
        if (other == nullptr) {
          throw Error(a.repeats[r] + ": there is no case " + cases[n].name);
        }
        verify::CompareRuns(cases[n], *other, a.repeats[r], &report);
      }
    } catch (const Error& error) {
      if (progress) fmt::print(stderr, "\r\033[K");
      throw Error(Source(a) + ": " + error.what());
    }
    if (progress) fmt::print(stderr, "\r\033[K");
    if (!a.quiet) fmt::print("{}", verify::ReportText(report));
    reports.push_back(std::move(report));
  }
  if (!a.json.empty()) WriteText(a.json, verify::ReportJson(reports));
  if (!a.html.empty()) WriteText(a.html, verify::ReportHtml(reports));
  size_t failed = 0;
  for (const CaseReport& report : reports) failed += report.pass ? 0 : 1;
  if (!a.quiet && reports.size() > 1) {
    fmt::print("{} of {} cases pass\n", reports.size() - failed,
               reports.size());
  }
  return failed == 0 ? kGood : kMismatch;
}

}  // namespace

Command AddVerify(CLI::App* app) {
  auto a = std::make_shared<Arguments>();
  app->add_option("FILE", a->file, "safetensors with inputs, and outputs");
  app->add_option("CANDIDATE", a->candidate,
                  "A second file with the outputs to judge");
  app->add_option("--shards", a->shards,
                  "The files of a run's ranks, in order: instead of FILE, or "
                  "the outputs to judge on FILE's inputs");
  app->add_option("--shard-by,--shard_by", a->shard_by,
                  "What the ranks cut: sequence, zigzag, striped, heads, batch")
      ->capture_default_str();
  app->add_option("--case", a->cases, "Judge this case alone (again: and this)")
      ->allow_extra_args(false);
  app->add_option("--map", a->maps, "q=NAME where the file has other names")
      ->allow_extra_args(false);
  app->add_option("--repeat", a->repeats,
                  "Outputs of further runs, which must be the same bits");
  app->add_option("--json", a->json, "Write the report here");
  app->add_option("--html", a->html, "Write the report here as one page");
  app->add_flag("--plain", a->plain,
                "Compute the answer by plain loops, slowly");
  app->add_flag("--no-diagnosis", a->no_diagnosis, "Judge only");
  app->add_flag("--quiet", a->quiet, "Print nothing");
  app->add_option("--threads", a->threads, "0: all cores")
      ->check(CLI::NonNegativeNumber);
  a->options.AddTo(app);
  app->footer(
      "  fa2 gen case.safetensors -B 1 -H 4 --nq 96 --nk 128 -D 64\n"
      "  your_kernel case.safetensors result.safetensors\n"
      "  fa2 verify case.safetensors result.safetensors --html report.html\n"
      "Exit code: 0 good, 1 a mismatch or runs that differ, 2 usage or a file "
      "that does not fit.");
  return [a] { return Run(*a); };
}

}  // namespace fa2::tool
