// SPDX-License-Identifier: Apache-2.0
#include "tools/demo/speed_table.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/peak/peak.h"
#include "fa2/attention.h"
#include "tests/support/tensor.h"

namespace fa2::demo {
namespace {

using test::MakeTensor;
using test::Sizes;
using test::Tensor;

struct Shape {
  DType dtype;
  int64_t head_dim;
  bool causal;
};

// Inputs and outputs of one shape.
struct Call {
  AttentionForwardArgs forward;
  AttentionBackwardArgs backward;
  std::vector<Tensor> tensors;
};

Call MakeCall(const Shape& shape, const SpeedOptions& options) {
  Call call;
  test::Random random(1);
  const Sizes rows = {1, options.heads, options.sequence, shape.head_dim};
  const auto make = [&](DType dtype, const Sizes& sizes, bool fill) {
    call.tensors.push_back(MakeTensor(dtype, sizes));
    if (fill) test::FillNormal(call.tensors.back().view, random);
    return call.tensors.back().view;
  };
  AttentionForwardArgs& f = call.forward;
  f.q = make(shape.dtype, rows, true);
  f.k = make(shape.dtype, rows, true);
  f.v = make(shape.dtype, rows, true);
  f.out = make(shape.dtype, rows, false);
  f.lse = make(DType::kF32, {1, options.heads, options.sequence, 1}, false);
  if (shape.causal) f.options.causal = Causal::kTopLeft;
  AttentionBackwardArgs& b = call.backward;
  b.dout = make(shape.dtype, rows, true);
  b.q = f.q;
  b.k = f.k;
  b.v = f.v;
  b.out = f.out;
  b.lse = f.lse;
  b.options = f.options;
  b.dq = make(shape.dtype, rows, false);
  b.dk = make(shape.dtype, rows, false);
  b.dv = make(shape.dtype, rows, false);
  return call;
}

// Median time of a call, in seconds; the first call, which makes the
// workspace, does not count.
double MedianSeconds(const std::function<Status()>& call, double budget) {
  using Clock = std::chrono::steady_clock;
  constexpr size_t kFewest = 3;
  std::vector<double> times;
  const auto start = Clock::now();
  const auto since = [](Clock::time_point t) {
    return std::chrono::duration<double>(Clock::now() - t).count();
  };
  for (bool warm = false; times.size() < kFewest || since(start) < budget;) {
    const auto before = Clock::now();
    const Status status = call();
    if (!status.ok()) throw std::runtime_error(status.message());
    if (warm) times.push_back(since(before));
    warm = true;
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2,
                   times.end());
  return times[times.size() / 2];
}

// "  123.4 GFLOP/s  81%", and the time.
std::string Speed(double seconds, double flops, double peak) {
  std::string text =
      fmt::format("{:9.2f} ms {:8.1f}", seconds * 1e3, flops / seconds / 1e9);
  return text + (peak > 0.0
                     ? fmt::format(" {:5.0f}%", 100.0 * flops / seconds / peak)
                     : fmt::format(" {:>6}", "-"));
}

}  // namespace

void PrintSpeedTable(const SpeedOptions& options, Context* context) {
  const ContextInfo info = context->Info();
  fmt::print(
      "Batch 1, {} heads, {} queries and keys, {} thread{}, target {}.\n"
      "GFLOP/s count 4 (forward) and 10 (backward) operations for each "
      "element of Q times key, half of it for causal;\nthe share is of the "
      "peak of the engine's instruction, measured with each row.\n\n",
      options.heads, options.sequence, info.num_threads,
      info.num_threads == 1 ? "" : "s", info.target);
  // The context names the engine of bf16; only AMX takes f32 as well.
  const bool on_amx = info.engine == "amx";
  if (on_amx) {
    fmt::print(
        "f32 on amx is a sum of three bf16 numbers, six products for each "
        "of bf16's.\n\n");
  }
  fmt::print("{:<22} {:<8} {:>11} {:>27} {:>27}\n", "", "engine", "peak",
             "forward   GFLOP/s  share", "backward   GFLOP/s  share");
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const std::string engine =
        dtype == DType::kBF16 || on_amx ? info.engine : "f32";
    for (const int64_t head_dim : {64, 128, 256}) {
      for (const bool causal : {false, true}) {
        const Shape shape = {dtype, head_dim, causal};
        const std::string name = fmt::format(
            "{} D={} {}", NameOf(dtype), head_dim, causal ? "causal" : "full");
        fmt::print(stderr, "\rmeasuring {} ...", name);
        std::fflush(stderr);
        const Call call = MakeCall(shape, options);
        const auto measure_peak = [&] {
          return peak::MeasurePeak(peak::UnitOfEngine(engine), info.num_threads,
                                   info.target);
        };
        const double before = measure_peak();
        const double forward = MedianSeconds(
            [&] { return AttentionForward(call.forward, context); },
            options.seconds);
        const double backward = MedianSeconds(
            [&] { return AttentionBackward(call.backward, context); },
            options.seconds);
        // New threads may share a core for a while: half the peak.
        const double peak = std::max(before, measure_peak());
        const double elements =
            static_cast<double>(options.heads * options.sequence) *
            static_cast<double>(options.sequence * head_dim) *
            (causal ? 0.5 : 1.0);
        fmt::print(stderr, "\r{:40}\r", "");
        fmt::print("{:<22} {:<8} {:>11.1f} {} {}\n", name, engine, peak / 1e9,
                   Speed(forward, 4.0 * elements, peak),
                   Speed(backward, 10.0 * elements, peak));
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace fa2::demo
