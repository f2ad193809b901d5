// SPDX-License-Identifier: Apache-2.0

// Speed of the training kernels against the memory bandwidth of the machine.
//
//   bench_ops [Google Benchmark's flags]
//
// Names are kernel/type/shape/Tthreads. Counters: GBps, the bytes of all inputs
// and outputs once, by time; copy_GBps, what a plain copy over arrays far
// larger than the caches reaches in this process on as many threads (with
// stores through or past the caches, whichever is faster); bandwidth_share, the
// ratio.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/peak/peak.h"
#include "fa2/context.h"
#include "fa2/training_ops.h"

namespace fa2::bench {
namespace {

// Memory of one case, in pages that start on a cache line; freed with it.
class Arrays {
 public:
  // Numbers between -1 and 1; ids for i32, in [0, limit).
  TensorView Add(DType dtype, int64_t rows, int64_t dim, int64_t limit = 1) {
    const auto count = static_cast<size_t>(rows * dim);
    const size_t bytes = (count * SizeOf(dtype) + 4095) / 4096 * 4096;
    void* data = std::aligned_alloc(4096, bytes);
    if (data == nullptr) {
      std::cerr << "bench_ops: out of memory\n";
      std::exit(1);
    }
    memory_.emplace_back(data);
    uint32_t state = 1;
    for (size_t i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      if (dtype == DType::kI32) {
        static_cast<int32_t*>(data)[i] =
            static_cast<int32_t>((state >> 8) % static_cast<uint64_t>(limit));
      } else if (dtype == DType::kBF16) {
        // Sign, exponents of [2^-4, 1), mantissa.
        static_cast<uint16_t*>(data)[i] =
            static_cast<uint16_t>(0x3D80 + (state >> 16 & 0x81FF));
      } else {
        static_cast<float*>(data)[i] =
            static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
      }
    }
    bytes_ += static_cast<double>(count * SizeOf(dtype));
    return Dense(data, dtype, 1, 1, rows, dim);
  }
  double bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::vector<std::unique_ptr<void, Free>> memory_;
  double bytes_ = 0;
};

using Call = std::function<Status(Context*)>;

struct Kernel {
  const char* name;
  // Makes the arrays of rows x dim and the call on them.
  Call (*prepare)(DType dtype, int64_t rows, int64_t dim, Arrays* arrays);
};

Call PrepareTranspose(DType dtype, int64_t rows, int64_t dim, Arrays* arrays) {
  const TensorView in = arrays->Add(dtype, rows, dim);
  const TensorView out = arrays->Add(dtype, dim, rows);
  return [=](Context* context) { return Transpose2d(in, out, context); };
}

Call PrepareSoftmax(DType dtype, int64_t rows, int64_t dim, Arrays* arrays) {
  const TensorView x = arrays->Add(dtype, rows, dim);
  const TensorView y = arrays->Add(dtype, rows, dim);
  return [=](Context* context) { return Softmax(x, y, context); };
}

Call PrepareSoftmaxBackward(DType dtype, int64_t rows, int64_t dim,
                            Arrays* arrays) {
  const TensorView dy = arrays->Add(dtype, rows, dim);
  const TensorView y = arrays->Add(dtype, rows, dim);
  const TensorView dx = arrays->Add(dtype, rows, dim);
  return [=](Context* context) { return SoftmaxBackward(dy, y, dx, context); };
}

Call PrepareRmsNorm(DType dtype, int64_t rows, int64_t dim, Arrays* arrays) {
  const TensorView x = arrays->Add(dtype, rows, dim);
  const TensorView weight = arrays->Add(DType::kF32, 1, dim);
  const TensorView y = arrays->Add(dtype, rows, dim);
  return [=](Context* context) { return RmsNorm(x, weight, 1e-5, y, context); };
}

Call PrepareRmsNormBackward(DType dtype, int64_t rows, int64_t dim,
                            Arrays* arrays) {
  RmsNormBackwardArgs args;
  args.dy = arrays->Add(dtype, rows, dim);
  args.x = arrays->Add(dtype, rows, dim);
  args.weight = arrays->Add(DType::kF32, 1, dim);
  args.dx = arrays->Add(dtype, rows, dim);
  args.dweight = arrays->Add(DType::kF32, 1, dim);
  return [=](Context* context) { return RmsNormBackward(args, context); };
}

Call PrepareEmbeddingBackward(DType dtype, int64_t rows, int64_t dim,
                              Arrays* arrays) {
  // A vocabulary of GPT-2's size, with as many tokens.
  constexpr int64_t kVocabulary = 50257;
  EmbeddingBackwardArgs args;
  args.dy = arrays->Add(dtype, rows, dim);
  args.ids = arrays->Add(DType::kI32, 1, rows, kVocabulary);
  args.dweight = arrays->Add(DType::kF32, kVocabulary, dim);
  return [=](Context* context) { return EmbeddingBackward(args, context); };
}

Call PrepareCrossEntropy(DType dtype, int64_t rows, int64_t dim,
                         Arrays* arrays) {
  CrossEntropyArgs args;
  args.logits = arrays->Add(dtype, rows, dim);
  args.targets = arrays->Add(DType::kI32, 1, rows, dim);
  args.loss = arrays->Add(DType::kF32, 1, 1);
  args.dlogits = arrays->Add(dtype, rows, dim);
  return [=](Context* context) { return CrossEntropy(args, context); };
}

// Halves of rows of Q are turned, as by Llama; a row of angles serves all
// heads.
RotaryEmbeddingArgs RotaryArrays(DType dtype, int64_t rows, int64_t dim,
                                 Arrays* arrays) {
  constexpr int64_t kHeads = 32;
  RotaryEmbeddingArgs args;
  const auto heads = [&](TensorView x) {
    return Dense(x.data, dtype, 1, kHeads, rows / kHeads, dim);
  };
  args.x = heads(arrays->Add(dtype, rows, dim));
  args.cos = arrays->Add(DType::kF32, rows / kHeads, dim / 2);
  args.sin = arrays->Add(DType::kF32, rows / kHeads, dim / 2);
  args.y = heads(arrays->Add(dtype, rows, dim));
  return args;
}

Call PrepareRotaryEmbedding(DType dtype, int64_t rows, int64_t dim,
                            Arrays* arrays) {
  const RotaryEmbeddingArgs args = RotaryArrays(dtype, rows, dim, arrays);
  return [=](Context* context) { return RotaryEmbedding(args, context); };
}

Call PrepareRotaryEmbeddingBackward(DType dtype, int64_t rows, int64_t dim,
                                    Arrays* arrays) {
  const RotaryEmbeddingArgs forward = RotaryArrays(dtype, rows, dim, arrays);
  RotaryEmbeddingBackwardArgs args;
  args.dy = forward.x;
  args.cos = forward.cos;
  args.sin = forward.sin;
  args.dx = forward.y;
  return
      [=](Context* context) { return RotaryEmbeddingBackward(args, context); };
}

Call PrepareSwiGlu(DType dtype, int64_t rows, int64_t dim, Arrays* arrays) {
  const TensorView gate = arrays->Add(dtype, rows, dim);
  const TensorView up = arrays->Add(dtype, rows, dim);
  const TensorView y = arrays->Add(dtype, rows, dim);
  return [=](Context* context) { return SwiGlu(gate, up, y, context); };
}

Call PrepareSwiGluBackward(DType dtype, int64_t rows, int64_t dim,
                           Arrays* arrays) {
  SwiGluBackwardArgs args;
  args.dy = arrays->Add(dtype, rows, dim);
  args.gate = arrays->Add(dtype, rows, dim);
  args.up = arrays->Add(dtype, rows, dim);
  args.dgate = arrays->Add(dtype, rows, dim);
  args.dup = arrays->Add(dtype, rows, dim);
  return [=](Context* context) { return SwiGluBackward(args, context); };
}

const peak::Bandwidth& BandwidthOf(int threads) {
  static std::map<int, peak::Bandwidth> measured;
  const auto found = measured.find(threads);
  if (found != measured.end()) return found->second;
  return measured[threads] = peak::MeasureBandwidth(threads);
}

void Run(benchmark::State& state, const Kernel& kernel, DType dtype,
         int64_t rows, int64_t dim, int threads) {
  const double copy = BandwidthOf(threads).copy;
  ContextOptions options;
  options.num_threads = threads;
  std::unique_ptr<Context> context;
  Status status = Context::Create(options, &context);
  Arrays arrays;
  if (status.ok()) {
    const Call call = kernel.prepare(dtype, rows, dim, &arrays);
    status = call(context.get());  // touches the outputs' pages
    for (auto _ : state) {
      if (status.ok()) status = call(context.get());
      benchmark::ClobberMemory();
    }
  }
  if (!status.ok()) {
    state.SkipWithError(status.message().c_str());
    return;
  }
  using benchmark::Counter;
  const auto rate = Counter::kIsIterationInvariantRate;
  state.counters["GBps"] = Counter(arrays.bytes() / 1e9, rate);
  state.counters["copy_GBps"] = copy / 1e9;
  if (copy > 0) {
    state.counters["bandwidth_share"] = Counter(arrays.bytes() / copy, rate);
  }
  state.SetLabel(context->Info().target);
}

void Register(const Kernel& kernel, int64_t rows, int64_t dim) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int threads : {1, cores}) {
      const std::string name = std::string(kernel.name) + "/" + NameOf(dtype) +
                               "/" + std::to_string(rows) + "x" +
                               std::to_string(dim) + "/T" +
                               std::to_string(threads);
      benchmark::RegisterBenchmark(name.c_str(),
                                   [=](benchmark::State& state) {
                                     Run(state, kernel, dtype, rows, dim,
                                         threads);
                                   })
          ->Unit(benchmark::kMillisecond)
          ->UseRealTime();
      if (cores == 1) break;
    }
  }
}

}  // namespace
}  // namespace fa2::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  using namespace fa2::bench;
  Register({"transpose", PrepareTranspose}, 8192, 8192);
  Register({"softmax", PrepareSoftmax}, 16384, 4096);
  Register({"softmax_backward", PrepareSoftmaxBackward}, 16384, 4096);
  Register({"rms_norm", PrepareRmsNorm}, 16384, 4096);
  Register({"rms_norm_backward", PrepareRmsNormBackward}, 16384, 4096);
  Register({"embedding_backward", PrepareEmbeddingBackward}, 50000, 1024);
  Register({"cross_entropy", PrepareCrossEntropy}, 4096, 131072);
  // Llama 3 8B at N 4,096: 32 heads of 128, and an MLP 14,336 wide.
  Register({"rotary_embedding", PrepareRotaryEmbedding}, 32 * 4096, 128);
  Register({"rotary_embedding_backward", PrepareRotaryEmbeddingBackward},
           32 * 4096, 128);
  Register({"swiglu", PrepareSwiGlu}, 4096, 14336);
  Register({"swiglu_backward", PrepareSwiGluBackward}, 4096, 14336);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
