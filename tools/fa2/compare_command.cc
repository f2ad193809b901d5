// SPDX-License-Identifier: Apache-2.0

// fa2 compare: two results of `fa2 bench`, case by case.
#include <fmt/core.h>

#include <cmath>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/verify/cases/error.h"
#include "tools/fa2/command.h"
#include "tools/fa2/ratio_interval.h"

namespace fa2::tool {
namespace {

using Json = nlohmann::ordered_json;
using verify::Error;

struct Arguments {
  std::string a, b, json;
  double threshold = 0.02;
};

struct Measured {
  std::string name;
  std::vector<double> rounds, peaks;
};

struct Results {
  std::string cpu, revision;
  std::vector<Measured> cases;
};

std::vector<double> Numbers(const Json& list) {
  std::vector<double> numbers;
  for (const Json& x : list) {
    numbers.push_back(x.get<double>());
    if (!(numbers.back() >= 0.0)) throw Error("a rate is negative");
  }
  return numbers;
}

Results Read(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw Error(path + ": the file cannot be read");
  const std::string text((std::istreambuf_iterator<char>(stream)), {});
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  Results results;
  try {
    results.cpu = json.at("cpu").get<std::string>();
    results.revision = json.at("revision").get<std::string>();
    for (const Json& c : json.at("cases")) {
      results.cases.push_back({c.at("name").get<std::string>(),
                               Numbers(c.at("rounds")),
                               Numbers(c.at("peak_rounds"))});
      for (const double rate : results.cases.back().rounds) {
        if (!(rate > 0.0)) throw Error("a rate is 0");
      }
      if (results.cases.back().rounds.empty()) throw Error("no rounds");
    }
  } catch (const std::exception&) {
    throw Error(path + ": it is no result of fa2 bench --json");
  }
  return results;
}

const char* Verdict(const RatioInterval& r, double threshold) {
  if (!r.sure) return "too few rounds";
  if (r.high < 1.0 && r.ratio < 1.0 - threshold) return "SLOWER";
  if (r.low > 1.0 && r.ratio > 1.0 + threshold) return "faster";
  if (r.low >= 1.0 - threshold && r.high <= 1.0 + threshold) return "same";
  if (std::abs(r.ratio - 1.0) <= threshold)
    return "same, as far as noise shows";
  return "too noisy to tell";
}

int Run(const Arguments& args) {
  const Results a = Read(args.a), b = Read(args.b);
  if (a.cpu != b.cpu) {
    fmt::print("the CPUs differ: {} and {}\n", a.cpu, b.cpu);
  }
  fmt::print("{:<44} {:>9} {:>7} {:>15}  verdict\n", "case", "GFLOP/s", "ratio",
             "95% interval");
  Json cases = Json::array();
  bool slower = false;
  for (const Measured& x : a.cases) {
    for (const Measured& y : b.cases) {
      if (x.name != y.name) continue;
      const RatioInterval r = IntervalOfRatio(x.rounds, y.rounds);
      const std::string verdict = Verdict(r, args.threshold);
      slower |= verdict == "SLOWER";
      const double rate = IntervalOfRatio({1.0}, y.rounds).ratio;
      std::string note;
      double peak_ratio = 1.0;
      const auto has_peaks = [](const std::vector<double>& peaks) {
        return !peaks.empty() && peaks.front() > 0.0;
      };
      if (has_peaks(x.peaks) && has_peaks(y.peaks)) {
        peak_ratio = IntervalOfRatio(x.peaks, y.peaks).ratio;
      }
      if (std::abs(peak_ratio - 1.0) > 0.05) {
        note = fmt::format(" (the machine's peak: {:.2f})", peak_ratio);
      }
      fmt::print("{:<44} {:>9.1f} {:>7.3f} {:>6.3f} - {:>6.3f}  {}{}\n", x.name,
                 rate, r.ratio, r.low, r.high, verdict, note);
      cases.push_back({{"name", x.name},
                       {"ratio", r.ratio},
                       {"interval", {r.low, r.high}},
                       {"peak_ratio", peak_ratio},
                       {"verdict", verdict}});
    }
  }
  if (cases.empty()) {
    throw Error(args.b + ": no case in it has a name of a case in " + args.a);
  }
  if (!args.json.empty()) {
    WriteText(args.json, Json{{"a", {{"cpu", a.cpu}, {"revision", a.revision}}},
                              {"b", {{"cpu", b.cpu}, {"revision", b.revision}}},
                              {"verdict", slower ? "slower" : "not slower"},
                              {"cases", cases}}
                                 .dump(1) +
                             "\n");
  }
  return slower ? kMismatch : kGood;
}

}  // namespace

Command AddCompare(CLI::App* app) {
  auto a = std::make_shared<Arguments>();
  app->add_option("A", a->a, "A result of fa2 bench --json")->required();
  app->add_option("B", a->b, "Another one: is it slower than A?")->required();
  app->add_option("--threshold", a->threshold,
                  "A smaller change than this share is none")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app->add_option("--json", a->json, "Write the comparison here");
  app->footer("Exit code: 0, or 1 where a case of B is slower.");
  return [a] { return Run(*a); };
}

}  // namespace fa2::tool
