// SPDX-License-Identifier: Apache-2.0
#include "bench/peak/peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "bench/peak/peak_kernels.h"
#include "src/platform/caches.h"

namespace fa2::peak {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Where threads wait for each other.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  void Wait() {
    const int round = round_.load();
    if (waiting_.fetch_add(1) + 1 == threads_) {
      waiting_.store(0);
      round_.store(round + 1);
      return;
    }
    // Yields, so that a thread that shares this core comes to run.
    while (round_.load() == round) std::this_thread::yield();
  }

 private:
  const int threads_;
  std::atomic<int> waiting_{0};
  std::atomic<int> round_{0};
};

// Runs body(thread) on `threads` threads that begin together; false, and
// nothing run, where the system gives no more threads.
template <class Body>
bool Together(int threads, const Body& body) {
  enum { kWait, kRun, kLeave };
  std::atomic<int> signal{kWait};
  std::vector<std::thread> others;
  const auto run = [&](int thread) {
    while (signal.load() == kWait) std::this_thread::yield();
    if (signal.load() == kRun) body(thread);
  };
  bool all = true;
  try {
    for (int thread = 1; thread < threads; ++thread) {
      others.emplace_back(run, thread);
    }
  } catch (const std::exception&) {
    all = false;
  }
  signal.store(all ? kRun : kLeave);
  if (all) body(0);
  for (std::thread& other : others) other.join();
  return all;
}

// Sum of the threads' rates while all of them run.
double FlopRate(FlopKernel kernel, int threads) {
  // 5 ms are long against a clock's step and short against a time slice.
  constexpr double kRoundSeconds = 5e-3;
  constexpr int kRounds = 5;
  constexpr size_t kChunk = 500;  // rounds of the kernel between looks at the
                                  // clock: tens of microseconds
  std::vector<std::vector<double>> rates(
      kRounds, std::vector<double>(static_cast<size_t>(threads)));
  const bool ran = Together(threads, [&](int thread) {
    std::mt19937 random(static_cast<unsigned>(thread) + 1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    alignas(64) float seed[64];
    for (float& value : seed) value = uniform(random);
    volatile float keep = 0;
    float sink = 0;
    for (int round = -1; round < kRounds; ++round) {  // -1: clocks ramp up
      double flops = 0;
      const Clock::time_point begin = Clock::now();
      Clock::time_point end;
      do {
        flops += kernel(kChunk, seed, &sink);
        keep = sink;
        end = Clock::now();
      } while (Seconds(begin, end) < kRoundSeconds);
      if (round >= 0) {
        rates[static_cast<size_t>(round)][static_cast<size_t>(thread)] =
            flops / Seconds(begin, end);
      }
    }
    (void)keep;
  });
  if (!ran) return 0;
  std::vector<double> sums;
  for (const std::vector<double>& round : rates) {
    double sum = 0;
    for (const double rate : round) sum += rate;
    sums.push_back(sum);
  }
  return Median(sums);
}

struct Free {
  void operator()(float* p) const { std::free(p); }
};

std::unique_ptr<float[], Free> Floats(size_t count) {
  return std::unique_ptr<float[], Free>(
      static_cast<float*>(std::aligned_alloc(4096, count * sizeof(float))));
}

}  // namespace

Unit UnitOfEngine(const std::string& engine) {
  if (engine == "f64") return Unit::kF64Fma;
  if (engine == "bf16dot") return Unit::kBf16Dot;
  if (engine == "amx") return Unit::kAmxBf16;
  return Unit::kF32Fma;
}

double MeasurePeak(Unit unit, int threads, const std::string& target) {
  std::vector<FlopKernel> kernels;
  const VectorKernels vector = VectorKernelsOf(target);
  switch (unit) {
    case Unit::kF32Fma:
      kernels = {vector.f32_fma[0], vector.f32_fma[1]};
      break;
    case Unit::kF64Fma:
      kernels = {vector.f64_fma[0], vector.f64_fma[1]};
      break;
    case Unit::kBf16Dot:
      kernels = {Bf16DotKernel()};
      break;
    case Unit::kAmxBf16:
      kernels = {AmxBf16Kernel()};
      break;
  }
  double best = 0;
  for (const FlopKernel kernel : kernels) {
    if (kernel != nullptr) {
      best = std::max(best, FlopRate(kernel, std::max(1, threads)));
    }
  }
  return best;
}

Bandwidth MeasureBandwidth(int threads, const std::string& target) {
  threads = std::max(1, threads);
  // Twice the last-level cache, at least 64 MiB, at most 1 GiB an array.
  const size_t bytes = std::min<size_t>(
      size_t{1} << 30,
      std::max<size_t>(size_t{64} << 20, 2 * platform::LastLevelCacheBytes()));
  const size_t step = 1024 * static_cast<size_t>(threads);
  const size_t count = bytes / sizeof(float) / step * step;
  const size_t share = count / static_cast<size_t>(threads);
  const auto a = Floats(count), b = Floats(count), c = Floats(count);
  if (a == nullptr || b == nullptr || c == nullptr) return {};

  const StreamKernel kernel = VectorKernelsOf(target).stream;
  constexpr int kRounds = 5;
  struct Kind {
    bool triad, stream;
    std::vector<double> rates;
  };
  std::vector<Kind> kinds = {{false, false, {}},
                             {false, true, {}},
                             {true, false, {}},
                             {true, true, {}}};
  Barrier barrier(threads);
  // The same threads from the first touch on: a thread that is new in every
  // round may share a core with another until the system moves it.
  const bool ran = Together(threads, [&](int thread) {
    const size_t first = share * static_cast<size_t>(thread);
    for (size_t i = first; i < first + share; ++i) {
      a[i] = 0;
      b[i] = 1;
      c[i] = static_cast<float>(i % 97);
    }
    for (Kind& kind : kinds) {
      for (int round = 0; round < kRounds; ++round) {
        barrier.Wait();
        const Clock::time_point begin = Clock::now();
        kernel(a.get() + first, b.get() + first,
               kind.triad ? c.get() + first : nullptr, share, kind.stream);
        barrier.Wait();
        if (thread == 0) {
          kind.rates.push_back((kind.triad ? 3.0 : 2.0) *
                               static_cast<double>(count) * sizeof(float) /
                               Seconds(begin, Clock::now()));
        }
      }
    }
  });
  Bandwidth result;
  if (!ran) return result;
  for (Kind& kind : kinds) {
    double& best = kind.triad ? result.triad : result.copy;
    best = std::max(best, Median(kind.rates));
  }
  return result;
}

}  // namespace fa2::peak
