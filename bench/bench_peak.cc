// SPDX-License-Identifier: Apache-2.0

// The machine's limits, as Google Benchmark counters: what bench/peak/peak.h
// measures, on one thread and on all.
#include <benchmark/benchmark.h>

#include <string>
#include <thread>

#include "bench/peak/peak.h"

namespace {

void Peak(benchmark::State& state, fa2::peak::Unit unit, int threads) {
  double flops = 0;
  for (auto _ : state) {
    flops = fa2::peak::MeasurePeak(unit, threads);
  }
  if (flops == 0) state.SkipWithError("this CPU lacks the unit");
  state.counters["GFLOPS"] = flops / 1e9;
}

void Memory(benchmark::State& state, int threads) {
  fa2::peak::Bandwidth bandwidth;
  for (auto _ : state) {
    bandwidth = fa2::peak::MeasureBandwidth(threads);
  }
  state.counters["copy_GBps"] = bandwidth.copy / 1e9;
  state.counters["triad_GBps"] = bandwidth.triad / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  for (const int threads : {1, cores}) {
    const std::string suffix = "/T" + std::to_string(threads);
    const auto add = [&](const char* name, fa2::peak::Unit unit) {
      benchmark::RegisterBenchmark((name + suffix).c_str(), Peak, unit, threads)
          ->Iterations(1)
          ->UseRealTime();
    };
    add("f32_fma", fa2::peak::Unit::kF32Fma);
    add("f64_fma", fa2::peak::Unit::kF64Fma);
    add("bf16dot", fa2::peak::Unit::kBf16Dot);
    add("amx_bf16", fa2::peak::Unit::kAmxBf16);
    benchmark::RegisterBenchmark(("memory" + suffix).c_str(), Memory, threads)
        ->Iterations(1)
        ->UseRealTime();
    if (cores == 1) break;
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
