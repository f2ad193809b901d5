// SPDX-License-Identifier: Apache-2.0

// Speed of AttentionForward and AttentionBackward.
//
//   bench_attention [--suite=default|full|fa2-paper|options] [--case=NAME]...
//                   [Google Benchmark's flags]
//
// A case's name is its whole description (bench/attention_case.h), so
// --case=backward/bf16/B1/H4/N512x1024/D64/causal/T0 runs a shape of your own.
// --benchmark_filter=REGEX picks from the full suite unless one is named.
//
// Counters: GFLOPS, useful operations by the count of AttentionCase::Flops;
// peak_GFLOPS, what the unit behind the engine in use can do on the same number
// of threads, measured just before and just after the timed loop; peak_share,
// the ratio (above 1 where bf16 `exact` takes dots beside the FMAs that it is
// held against); workspace_MB, the most that the context held.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "bench/attention_case.h"
#include "bench/peak/peak.h"
#include "fa2/attention.h"
#include "fa2/context.h"

namespace fa2::bench {
namespace {

// Random data in pages that start on a cache line.
class Array {
 public:
  Array() = default;
  Array(DType dtype, int64_t b, int64_t h, int64_t n, int64_t d) {
    const size_t count = static_cast<size_t>(b * h * n * d);
    const size_t bytes = (count * SizeOf(dtype) + 4095) / 4096 * 4096;
    data_.reset(std::aligned_alloc(4096, bytes == 0 ? 4096 : bytes));
    if (data_ == nullptr) {
      std::cerr << "bench_attention: out of memory\n";
      std::exit(1);
    }
    view_ = Dense(data_.get(), dtype, b, h, n, d);
    Fill(count);
  }
  const TensorView& view() const { return view_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };

  // Sums of four uniform variates, of variance 1: near enough to normal.
  void Fill(size_t count) {
    static uint64_t state = 0x9E3779B97F4A7C15u;
    for (size_t i = 0; i < count; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      float sum = 0;
      for (int shift = 0; shift < 64; shift += 16) {
        sum += static_cast<float>((state >> shift) & 0xFFFF) / 65536.0f - 0.5f;
      }
      Put(i, sum * 1.7320508f);
    }
  }

  void Put(size_t i, float value) {
    char* to = static_cast<char*>(data_.get()) + i * SizeOf(view_.dtype);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    switch (view_.dtype) {
      case DType::kF32:
        std::memcpy(to, &value, sizeof value);
        break;
      case DType::kF64: {
        const double wide = value;
        std::memcpy(to, &wide, sizeof wide);
        break;
      }
      case DType::kBF16: {
        const uint16_t high = static_cast<uint16_t>(bits >> 16);
        std::memcpy(to, &high, sizeof high);
        break;
      }
      case DType::kF16: {
        // Truncated; below 2^-14 to 0.
        const int32_t exponent =
            static_cast<int32_t>((bits >> 23) & 0xFF) - 127 + 15;
        uint32_t half = (bits >> 16) & 0x8000;
        if (exponent > 0) {
          half |= static_cast<uint32_t>(exponent) << 10 | ((bits >> 13) & 1023);
        }
        const uint16_t narrow = static_cast<uint16_t>(half);
        std::memcpy(to, &narrow, sizeof narrow);
        break;
      }
      default:
        *to = 1;
    }
  }

  std::unique_ptr<void, Free> data_;
  TensorView view_;
};

// The arrays and arguments of one case.
struct Problem {
  explicit Problem(const AttentionCase& c) {
    const int64_t b = c.packed.empty() ? c.batch : 1;
    const int64_t h = c.heads, kv = c.kv_heads;
    const int64_t queries = c.TotalQueries(), keys = c.TotalKeys();
    const DType t = c.dtype;
    const DType statistics = t == DType::kF64 ? DType::kF64 : DType::kF32;
    AttentionOptions options;
    options.causal = c.causal ? Causal::kTopLeft : Causal::kNone;
    if (c.window > 0) options.window_left = c.window - 1;
    options.precision = c.precision;
    if (!c.packed.empty()) {
      const TensorView sums =
          Add(DType::kI64, 1, 1, 1, static_cast<int64_t>(c.packed.size()) + 1);
      int64_t* const sum = static_cast<int64_t*>(sums.data);
      sum[0] = 0;
      for (size_t i = 0; i < c.packed.size(); ++i) {
        sum[i + 1] = sum[i] + c.packed[i];
      }
      options.cu_seqlens_q = options.cu_seqlens_k = sums;
      options.max_seqlen_q = options.max_seqlen_k =
          *std::max_element(c.packed.begin(), c.packed.end());
    }
    if (c.bias) {
      options.bias = Add(c.bias_dtype, 1, h, queries, keys);
    } else if (c.mask) {
      const TensorView mask = Add(DType::kBool, 1, 1, queries, keys);
      char* const shown = static_cast<char*>(mask.data);
      for (int64_t i = 0; c.document > 0 && i < queries * keys; ++i) {
        shown[i] = i / keys / c.document == i % keys / c.document;
      }
      options.bias = mask;
    }
    if (c.dropout) options.dropout_p = 0.1;
    if (c.softcap) options.softcap = 30.0;
    if (c.alibi) {
      const TensorView slopes = Add(DType::kF32, 1, h, 1, 1);
      for (int64_t i = 0; i < h; ++i) {
        // 2^-1 to 2^-8, as Press et al. 2021 choose them for 8 heads.
        static_cast<float*>(slopes.data)[i] =
            std::ldexp(1.0f, -1 - static_cast<int>(i % 8));
      }
      options.alibi_slopes = slopes;
    }
    if (c.sinks) options.sinks = Add(DType::kF32, 1, h, 1, 1);

    forward.q = Add(t, b, h, queries, c.head_dim);
    forward.k = Add(t, b, kv, keys, c.head_dim);
    forward.v = Add(t, b, kv, keys, c.head_dim);
    forward.out = Add(t, b, h, queries, c.head_dim);
    forward.lse = Add(statistics, b, h, queries, 1);
    forward.options = options;

    backward.q = forward.q;
    backward.k = forward.k;
    backward.v = forward.v;
    backward.out = forward.out;
    backward.lse = forward.lse;
    backward.dout = Add(t, b, h, queries, c.head_dim);
    backward.dq = Add(t, b, h, queries, c.head_dim);
    backward.dk = Add(t, b, kv, keys, c.head_dim);
    backward.dv = Add(t, b, kv, keys, c.head_dim);
    if (c.dbias) backward.dbias = Add(c.bias_dtype, 1, h, queries, keys);
    if (c.sinks) backward.dsinks = Add(DType::kF32, 1, h, 1, 1);
    backward.options = options;
  }

  TensorView Add(DType dtype, int64_t b, int64_t h, int64_t n, int64_t d) {
    arrays.emplace_back(dtype, b, h, n, d);
    return arrays.back().view();
  }

  std::vector<Array> arrays;
  AttentionForwardArgs forward;
  AttentionBackwardArgs backward;
};

Status Run(const AttentionCase& c, const Problem& problem, Context* context) {
  if (c.pass != Pass::kBackward) {
    Status status = AttentionForward(problem.forward, context);
    if (!status.ok()) return status;
  }
  if (c.pass != Pass::kForward) {
    return AttentionBackward(problem.backward, context);
  }
  return Status::Ok();
}

// Google Benchmark calls a benchmark several times to find its number of
// iterations; what a case needs is made once, and dropped for the next case.
struct Prepared {
  std::string name;
  std::unique_ptr<Context> context;
  std::unique_ptr<Problem> problem;
  Status status;
};

Prepared& Prepare(const AttentionCase& c) {
  static Prepared prepared;
  if (prepared.name == c.Name()) return prepared;
  prepared = {};
  prepared.name = c.Name();
  ContextOptions options;
  options.num_threads = c.threads;
  prepared.status = Context::Create(options, &prepared.context);
  if (!prepared.status.ok()) return prepared;
  prepared.problem = std::make_unique<Problem>(c);
  Context* context = prepared.context.get();
  // The backward needs the forward's out and lse; one run of what is timed
  // warms caches and workspace.
  prepared.status = AttentionForward(prepared.problem->forward, context);
  if (prepared.status.ok()) {
    prepared.status = Run(c, *prepared.problem, context);
  }
  return prepared;
}

// Info() names the engine of bf16 in `fast`. AMX takes everything but f64, as
// several products of bf16 where one does not do.
peak::Unit UnitOf(const AttentionCase& c, const ContextInfo& info) {
  if (c.dtype == DType::kF64) return peak::Unit::kF64Fma;
  const peak::Unit unit = peak::UnitOfEngine(info.engine);
  if (unit == peak::Unit::kAmxBf16) return unit;
  if (c.dtype == DType::kBF16 && c.precision != Precision::kExact) return unit;
  return peak::Unit::kF32Fma;
}

void Attention(benchmark::State& state, const AttentionCase& c) {
  Prepared& prepared = Prepare(c);
  if (!prepared.status.ok()) {
    state.SkipWithError(prepared.status.message().c_str());
    return;
  }
  const ContextInfo info = prepared.context->Info();
  const peak::Unit unit = UnitOf(c, info);
  const double before = peak::MeasurePeak(unit, c.threads, info.target);
  const auto begin = std::chrono::steady_clock::now();
  for (auto _ : state) {
    const Status status = Run(c, *prepared.problem, prepared.context.get());
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
      static_cast<double>(prepared.context->PeakWorkspaceBytes()) / 1e6;
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
