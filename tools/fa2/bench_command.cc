// SPDX-License-Identifier: Apache-2.0

// fa2 bench: the machine's limits, then cases, each as a share of them.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "bench/attention/call.h"
#include "bench/attention/case.h"
#include "bench/peak/peak.h"
#include "fa2_revision.h"
#include "src/verify/cases/error.h"
#include "src/verify/page/page.h"
#include "tools/fa2/bench_js.h"
#include "tools/fa2/command.h"
#include "tools/fa2/machine.h"
#include "tools/fa2/shape.h"

namespace fa2::tool {
namespace {

using bench::AttentionCase;
using Json = nlohmann::ordered_json;
using verify::Error;

struct Arguments {
  std::vector<std::string> cases;
  std::string suite, json, html;
  int rounds = 9;
  double min_time = 0.1;  // seconds of a round
  bool quiet = false;
};

constexpr std::pair<peak::Unit, const char*> kUnits[] = {
    {peak::Unit::kF32Fma, "f32_fma"},
    {peak::Unit::kF64Fma, "f64_fma"},
    {peak::Unit::kBf16Dot, "bf16dot"},
    {peak::Unit::kAmxBf16, "amx_bf16"}};

const char* NameOf(peak::Unit unit) {
  for (const auto& [known, name] : kUnits) {
    if (known == unit) return name;
  }
  return "";
}

// The name of a case that is given as `gen` takes a shape, in numbers.
std::string CaseName(const std::string& text) {
  if (text.find(',') == std::string::npos ||
      text.find_first_not_of("0123456789,x ") != std::string::npos) {
    return text;
  }
  Shape s = ParseShape(text);
  s.Complete();
  if (s.value_dim != s.head_dim) {
    throw Error("--shape is " + text + ", and v must be as wide as q");
  }
  return fmt::format("B{}/H{}/KV{}/N{}x{}/D{}", s.batch, s.heads, s.kv_heads,
                     s.nq, s.nk, s.head_dim);
}

std::vector<AttentionCase> Cases(const Arguments& a) {
  std::vector<AttentionCase> cases;
  for (const std::string& name : a.cases) {
    AttentionCase c;
    std::string error;
    if (!bench::ParseCase(CaseName(name), &c, &error)) throw Error(error);
    cases.push_back(c);
  }
  const std::string suite =
      a.suite.empty() && cases.empty() ? "default" : a.suite;
  if (suite.empty()) return cases;
  const std::vector<AttentionCase> listed = bench::Suite(suite);
  if (listed.empty()) {
    throw Error("--suite is " + suite +
                ", it must be default, full, fa2-paper or options");
  }
  cases.insert(cases.end(), listed.begin(), listed.end());
  return cases;
}

std::string Threads(int n) {
  return fmt::format("{} {}", n, n == 1 ? "thread" : "threads");
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2.0;
}

// The machine's limits on each number of threads that a case uses.
Json Limits(const std::set<int>& threads) {
  Json peaks = Json::array(), memory = Json::array();
  for (const int t : threads) {
    for (const auto& [unit, name] : kUnits) {
      const double peak = peak::MeasurePeak(unit, t);
      if (peak == 0.0) continue;
      peaks.push_back(
          {{"unit", name}, {"threads", t}, {"gflops", peak * 1e-9}});
    }
    const peak::Bandwidth bandwidth = peak::MeasureBandwidth(t);
    memory.push_back({{"threads", t},
                      {"copy_gbps", bandwidth.copy * 1e-9},
                      {"triad_gbps", bandwidth.triad * 1e-9}});
  }
  return {{"peaks", peaks}, {"memory", memory}};
}

double BandwidthOf(const Json& machine, int threads) {
  for (const Json& memory : machine["memory"]) {
    if (memory["threads"] == threads) return memory["triad_gbps"];
  }
  return 0.0;
}

// Calls a second of one round.
double Rate(const bench::AttentionCall& call, double min_time) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  int64_t calls = 0;
  for (;;) {
    const Status status = call.Run();
    if (!status.ok()) throw Error(status.message());
    ++calls;
    const std::chrono::duration<double> elapsed = Clock::now() - begin;
    if (elapsed.count() >= min_time) {
      return static_cast<double>(calls) / elapsed.count();
    }
  }
}

Json Measure(const AttentionCase& c, const Arguments& a, const Json& machine) {
  std::unique_ptr<bench::AttentionCall> call;
  const Status status = bench::AttentionCall::Create(c, &call);
  if (!status.ok()) throw Error(c.Name() + ": " + status.message());
  const ContextInfo info = call->Info();
  const peak::Unit unit = bench::UnitOf(c, info);
  std::vector<double> rates, peaks;
  for (int round = 0; round < a.rounds; ++round) {
    // The peak in the same seconds: clocks and neighbours change.
    peaks.push_back(peak::MeasurePeak(unit, c.threads, info.target) * 1e-9);
    rates.push_back(c.Flops() * Rate(*call, a.min_time) * 1e-9);
  }
  const double rate = Median(rates), peak = Median(peaks);
  const double intensity = c.Flops() / static_cast<double>(call->Bytes());
  const double bandwidth = BandwidthOf(machine, c.threads);
  double limit = peak;
  if (bandwidth > 0.0) limit = std::min(limit, intensity * bandwidth);
  const auto share = [rate](double of) {
    return of > 0.0 ? Json(rate / of) : Json(nullptr);
  };
  return {{"name", c.Name()},
          {"queries", c.TotalQueries()},
          {"keys", c.TotalKeys()},
          {"threads", c.threads},
          {"gflops", rate},
          {"rounds", rates},
          {"unit", NameOf(unit)},
          {"peak_gflops", peak},
          {"peak_rounds", peaks},
          {"peak_share", share(peak)},
          {"flops_per_byte", intensity},
          {"limit_gflops", limit},
          {"limit_share", share(limit)},
          {"workspace_bytes", call->PeakWorkspaceBytes()},
          {"target", info.target},
          {"engine", info.engine}};
}

int Run(const Arguments& a) {
  const std::vector<AttentionCase> cases = Cases(a);
  std::set<int> threads;
  for (const AttentionCase& c : cases) threads.insert(c.threads);
  const bool progress = !a.quiet && isatty(2) != 0;
  Json root;
  root["fa2"] = FA2_VERSION;
  root["revision"] = FA2_REVISION;
  root["cpu"] = CpuName();
  root["cores"] = std::thread::hardware_concurrency();
  if (progress) fmt::print(stderr, "\r\033[Kpeaks and memory ");
  root["machine"] = Limits(threads);
  if (progress) fmt::print(stderr, "\r\033[K");
  if (!a.quiet) {
    fmt::print("{}, fa2 {} {}\n", CpuName(), FA2_VERSION, FA2_REVISION);
    for (const Json& p : root["machine"]["peaks"]) {
      fmt::print("  {:<9} {:>9.1f} GFLOP/s on {}\n",
                 p["unit"].get<std::string>(), p["gflops"].get<double>(),
                 Threads(p["threads"].get<int>()));
    }
    for (const Json& m : root["machine"]["memory"]) {
      fmt::print("  memory    {:>9.1f} GB/s on {}\n",
                 m["triad_gbps"].get<double>(),
                 Threads(m["threads"].get<int>()));
    }
    fmt::print("{:<44} {:>9} {:>7} {:>7}\n", "case", "GFLOP/s", "peak",
               "limit");
  }
  root["cases"] = Json::array();
  for (size_t n = 0; n < cases.size(); ++n) {
    if (progress) {
      fmt::print(stderr, "\r\033[K{}/{} {} ", n + 1, cases.size(),
                 cases[n].Name());
    }
    const Json result = Measure(cases[n], a, root["machine"]);
    if (progress) fmt::print(stderr, "\r\033[K");
    if (!a.quiet) {
      const auto share = [&result](const char* key) {
        return result[key].is_null()
                   ? std::string("-")
                   : fmt::format("{:.2f}", result[key].get<double>());
      };
      fmt::print("{:<44} {:>9.1f} {:>7} {:>7}\n",
                 result["name"].get<std::string>(),
                 result["gflops"].get<double>(), share("peak_share"),
                 share("limit_share"));
    }
    root["cases"].push_back(result);
  }
  if (!a.json.empty()) WriteText(a.json, root.dump(1) + "\n");
  if (!a.html.empty()) {
    WriteText(a.html, verify::Page("fa2 bench", root.dump(), verify::kBenchJs));
  }
  return kGood;
}

}  // namespace

Command AddBench(CLI::App* app) {
  auto a = std::make_shared<Arguments>();
  app->add_option("CASE,--shape", a->cases,
                  "backward/bf16/B1/H8/KV2/N2048/D128/causal/T0 or any part of "
                  "it, or B,H,Hkv,Nq,Nk,D; T0: all cores");
  app->add_option("--suite", a->suite,
                  "default (without CASE), full, fa2-paper or options");
  app->add_option("--rounds", a->rounds, "Timings of a case")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app->add_option("--min-time,--min_time", a->min_time, "Seconds of a timing")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  app->add_option("--json", a->json, "Write the results here");
  app->add_option("--html", a->html, "Write the results here as one page");
  app->add_flag("--quiet", a->quiet, "Print nothing");
  return [a] { return Run(*a); };
}

}  // namespace fa2::tool
