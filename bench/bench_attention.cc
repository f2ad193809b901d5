// SPDX-License-Identifier: Apache-2.0

// Speed of AttentionForward and AttentionBackward.
//
//   bench_attention [--suite=default|full|fa2-paper|options] [--case=NAME]...
//                   [Google Benchmark's flags]
//
// A case's name is its whole description (bench/attention/case.h), so
// --case=backward/bf16/B1/H4/N512x1024/D64/causal/T0 runs a shape of your own.
// --benchmark_filter=REGEX picks from the full suite unless one is named.
//
// Counters: GFLOPS, useful operations by the count of AttentionCase::Flops;
// peak_GFLOPS, what the unit behind the engine in use can do on the same number
// of threads, measured just before and just after the timed loop; peak_share,
// the ratio (above 1 where bf16 `exact` takes dots beside the FMAs that it is
// held against); workspace_MB, the most that the context held.
#include <benchmark/benchmark.h>

#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "bench/attention/call.h"
#include "bench/attention/case.h"
#include "bench/peak/peak.h"
#include "fa2/context.h"

namespace fa2::bench {
namespace {

// Google Benchmark calls a benchmark several times to find its number of
// iterations; what a case needs is made once, and dropped for the next case.
struct Prepared {
  std::string name;
  std::unique_ptr<AttentionCall> call;
  Status status;
};

Prepared& Prepare(const AttentionCase& c) {
  static Prepared prepared;
  if (prepared.name == c.Name()) return prepared;
  prepared = {};
  prepared.name = c.Name();
  prepared.status = AttentionCall::Create(c, &prepared.call);
  return prepared;
}

void Attention(benchmark::State& state, const AttentionCase& c) {
  Prepared& prepared = Prepare(c);
  if (!prepared.status.ok()) {
    state.SkipWithError(prepared.status.message().c_str());
    return;
  }
  const AttentionCall& call = *prepared.call;
  const ContextInfo info = call.Info();
  const peak::Unit unit = UnitOf(c, info);
  const double before = peak::MeasurePeak(unit, c.threads, info.target);
  const auto begin = std::chrono::steady_clock::now();
  for (auto _ : state) {
    const Status status = call.Run();
    benchmark::DoNotOptimize(status.ok());
    benchmark::ClobberMemory();
  }
  const std::chrono::duration<double> elapsed =
      std::chrono::steady_clock::now() - begin;
  const double after = peak::MeasurePeak(unit, c.threads, info.target);
  const double rate =
      c.Flops() * static_cast<double>(state.iterations()) / elapsed.count();
  state.counters["GFLOPS"] = rate / 1e9;
  if (before > 0 && after > 0) {
    const double peak = (before + after) / 2;
    state.counters["peak_GFLOPS"] = peak / 1e9;
    state.counters["peak_share"] = rate / peak;
  }
  state.counters["workspace_MB"] =
      static_cast<double>(call.PeakWorkspaceBytes()) / 1e6;
  state.SetLabel(info.target + "/" + info.engine);
}

// Takes --suite= and --case= out of the arguments.
bool TakeCases(int* argc, char** argv, std::vector<AttentionCase>* cases) {
  std::string suite;
  bool filtered = false;
  int kept = 1;
  for (int i = 1; i < *argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--suite=", 0) == 0) {
      suite = arg.substr(8);
    } else if (arg.rfind("--case=", 0) == 0) {
      AttentionCase c;
      std::string error;
      if (!ParseCase(arg.substr(7), &c, &error)) {
        std::cerr << "bench_attention: " << error << '\n';
        return false;
      }
      cases->push_back(c);
    } else {
      filtered |= arg.rfind("--benchmark_filter", 0) == 0;
      argv[kept++] = argv[i];
    }
  }
  *argc = kept;
  if (suite.empty() && cases->empty()) suite = filtered ? "full" : "default";
  if (suite.empty()) return true;
  const std::vector<AttentionCase> listed = Suite(suite);
  if (listed.empty()) {
    std::cerr << "bench_attention: --suite is \"" << suite
              << "\"; it must be default, full, fa2-paper or options\n";
    return false;
  }
  cases->insert(cases->end(), listed.begin(), listed.end());
  return true;
}

int Main(int argc, char** argv) {
  std::vector<AttentionCase> cases;
  if (!TakeCases(&argc, argv, &cases)) return 2;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  for (const AttentionCase& c : cases) {
    benchmark::RegisterBenchmark(
        c.Name().c_str(), [c](benchmark::State& state) { Attention(state, c); })
        ->Unit(benchmark::kMillisecond)
        ->UseRealTime();
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace
}  // namespace fa2::bench

int main(int argc, char** argv) { return fa2::bench::Main(argc, argv); }
