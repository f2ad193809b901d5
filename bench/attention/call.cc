// SPDX-License-Identifier: Apache-2.0
#include "bench/attention/call.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "bench/attention/block_pattern.h"
#include "fa2/attention.h"

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
    if (data_ == nullptr) throw std::bad_alloc();
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

}  // namespace

// The arrays and arguments of one case.
struct AttentionCall::Problem {
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
    if (!c.blocks.empty()) {
      blocks = std::make_unique<BlockPattern>(c.blocks, queries, keys);
      block_mask = blocks->mask();
      options.block_mask = &block_mask;
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

  // Of the backward: q, k, v, out, dout, lse and three gradients; and a bias.
  size_t Bytes(Pass pass) const {
    const auto bytes = [](const auto& view) {
      size_t count = view.data == nullptr ? 0 : SizeOf(view.dtype);
      for (const int64_t n : view.sizes) count *= static_cast<size_t>(n);
      return count;
    };
    const AttentionForwardArgs& f = forward;
    const AttentionBackwardArgs& b = backward;
    const size_t inputs =
        bytes(f.q) + bytes(f.k) + bytes(f.v) + bytes(f.options.bias);
    const size_t results = bytes(f.out) + bytes(f.lse);
    const size_t gradients = bytes(b.dout) + bytes(b.dq) + bytes(b.dk) +
                             bytes(b.dv) + bytes(b.dbias);
    size_t total = 0;
    if (pass != Pass::kBackward) total += inputs + results;
    if (pass != Pass::kForward) total += inputs + results + gradients;
    return total;
  }

  TensorView Add(DType dtype, int64_t b, int64_t h, int64_t n, int64_t d) {
    arrays.emplace_back(dtype, b, h, n, d);
    return arrays.back().view();
  }

  std::vector<Array> arrays;
  std::unique_ptr<BlockPattern> blocks;
  BlockMask block_mask;
  AttentionForwardArgs forward;
  AttentionBackwardArgs backward;
};

AttentionCall::AttentionCall(const AttentionCase& c,
                             std::unique_ptr<Context> context)
    : case_(c),
      context_(std::move(context)),
      problem_(std::make_unique<Problem>(c)) {}

AttentionCall::~AttentionCall() = default;

Status AttentionCall::Create(const AttentionCase& c,
                             std::unique_ptr<AttentionCall>* result) {
  ContextOptions options;
  options.num_threads = c.threads;
  std::unique_ptr<Context> context;
  Status status = Context::Create(options, &context);
  if (!status.ok()) return status;
  result->reset(new AttentionCall(c, std::move(context)));
  const AttentionCall& call = **result;
  status = AttentionForward(call.problem_->forward, call.context_.get());
  return status.ok() ? call.Run() : status;
}

Status AttentionCall::Run() const {
  if (case_.pass != Pass::kBackward) {
    Status status = AttentionForward(problem_->forward, context_.get());
    if (!status.ok()) return status;
  }
  if (case_.pass != Pass::kForward) {
    return AttentionBackward(problem_->backward, context_.get());
  }
  return Status::Ok();
}

ContextInfo AttentionCall::Info() const { return context_->Info(); }

size_t AttentionCall::PeakWorkspaceBytes() const {
  return context_->PeakWorkspaceBytes();
}

size_t AttentionCall::Bytes() const { return problem_->Bytes(case_.pass); }

// Info() names the engine of bf16 in `fast`. AMX takes everything but f64, as
// several products of bf16 where one does not do.
peak::Unit UnitOf(const AttentionCase& c, const ContextInfo& info) {
  if (c.dtype == DType::kF64) return peak::Unit::kF64Fma;
  const peak::Unit unit = peak::UnitOfEngine(info.engine);
  if (unit == peak::Unit::kAmxBf16) return unit;
  if (c.dtype == DType::kBF16 && c.precision != Precision::kExact) return unit;
  return peak::Unit::kF32Fma;
}

}  // namespace fa2::bench
