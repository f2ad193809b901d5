// SPDX-License-Identifier: Apache-2.0
#include "tests/compat/mem_efficient_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace fa2::test {
namespace {

// (batch, row, head) of a [B, H, M, K] view.
void CopyStrides(const TensorView& view, int64_t (&strides)[3]) {
  strides[0] = view.strides[0];
  strides[1] = view.strides[2];
  strides[2] = view.strides[1];
}

void CopyBiasStrides(const TensorView& view, int64_t (&strides)[3]) {
  for (size_t i = 0; i < 3; ++i) strides[i] = view.strides[i];
}

std::vector<int32_t> PrefixSums(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> sums = {0};
  for (const int32_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

// The kernel's masks as its own documentation words them, rather than as fa2's
// options.
Tensor VisibleKeys(const MemEfficientCase& c) {
  const Tensor mask = MakeTensor(DType::kBool, {1, 1, c.queries, c.keys});
  const int64_t shift = c.mask_type == 2 ? c.keys - c.queries : 0;
  ForEachIndex(mask.view.sizes, [&](const Sizes& at) {
    const int64_t i = at[2], j = at[3];
    bool visible = true;
    if (c.mask_type != 0 && j > i + shift) visible = false;
    if (c.window > 0 && j <= i + shift - c.window) visible = false;
    Set(mask.view, at, visible ? 1.0 : 0.0);
  });
  return mask;
}

// An additive bias with the mask in it.
Tensor MaskedBias(const Tensor& bias, const Tensor& visible) {
  const Tensor masked = MakeTensor(DType::kF64, bias.view.sizes);
  ForEachIndex(masked.view.sizes, [&](const Sizes& at) {
    const bool seen = Get(visible.view, {0, 0, at[2], at[3]}) != 0.0;
    Set(masked.view, at,
        seen ? Get(bias.view, at) : -std::numeric_limits<double>::infinity());
  });
  return masked;
}

}  // namespace

MemEfficientCall MakeMemEfficientCall(const MemEfficientCase& given) {
  MemEfficientCase c = given;
  Random random(static_cast<uint64_t>(c.queries * 1000 + c.keys));
  MemEfficientCall call;
  const bool varlen = !c.lengths_q.empty();
  int64_t batch = c.batch, rows_q = c.queries, rows_k = c.keys;
  if (varlen) {
    call.cu_q = PrefixSums(c.lengths_q);
    call.cu_k = PrefixSums(c.lengths_k);
    c.batch = static_cast<int32_t>(c.lengths_q.size());
    c.queries = *std::max_element(c.lengths_q.begin(), c.lengths_q.end());
    c.keys = *std::max_element(c.lengths_k.begin(), c.lengths_k.end());
    batch = 1;
    rows_q = call.cu_q.back();
    rows_k = call.cu_k.back();
  }
  const Sizes q_sizes = {batch, c.heads, rows_q, c.dim};
  const Sizes k_sizes = {batch, c.heads, rows_k, c.dim};
  const Sizes v_sizes = {batch, c.heads, rows_k, c.value_dim};
  const Sizes o_sizes = {batch, c.heads, rows_q, c.value_dim};
  const Sizes bias_sizes = {batch, c.heads, c.queries, c.keys};
  call.q = MakeNormal(c.dtype, q_sizes, random, Layout::kBshd);
  call.k = MakeNormal(c.dtype, k_sizes, random, Layout::kBshd);
  call.v = MakeNormal(c.dtype, v_sizes, random, Layout::kBshd);
  call.dout = MakeNormal(c.dtype, o_sizes, random, Layout::kBshd);
  if (c.bias) call.bias = MakeNormal(c.dtype, bias_sizes, random);

  const float scale = 1.0f / std::sqrt(static_cast<float>(c.dim));
  AttentionBackwardArgs args;
  args.q = call.q.view;
  args.k = call.k.view;
  args.v = call.v.view;
  args.dout = call.dout.view;
  args.options.scale = scale;
  args.options.dropout_p = c.dropout;
  args.options.philox_seed = 1248;
  args.options.philox_offset = 41;
  Tensor mask;
  if (varlen) {
    // The oracle's own masks: bias does not go with packed sequences.
    const auto sums = static_cast<int64_t>(call.cu_q.size());
    args.options.cu_seqlens_q =
        Dense(call.cu_q.data(), DType::kI32, 1, 1, 1, sums);
    args.options.cu_seqlens_k =
        Dense(call.cu_k.data(), DType::kI32, 1, 1, 1, sums);
    args.options.causal = static_cast<Causal>(c.mask_type);
    if (c.window > 0) args.options.window_left = c.window - 1;
  } else {
    mask = VisibleKeys(c);
    if (c.bias) mask = MaskedBias(call.bias, mask);
    args.options.bias = mask.view;
  }
  call.truth = ComputeTruth(args, c.dtype, Layout::kBshd);

  call.out = call.truth.out;
  // [B, H, Mq + a gap]: what lies past the rows is NaN.
  call.lse = MakeTensor(DType::kF32, {c.batch, c.heads, c.queries, 1},
                        Layout::kPaddedRows);
  call.lse.view.strides = {int64_t{c.heads} * (c.queries + 3), c.queries + 3, 1,
                           1};
  call.lse.buffer = std::make_shared<Buffer>(
      static_cast<size_t>(c.batch * c.heads * (c.queries + 3)) * 4);
  call.lse.view.data = call.lse.buffer->data();
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t begin = varlen ? call.cu_q[static_cast<size_t>(b)] : 0;
    const int64_t rows =
        varlen ? c.lengths_q[static_cast<size_t>(b)] : c.queries;
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        Set(call.lse.view, {b, h, i, 0},
            Get(call.truth.lse.view, {varlen ? 0 : b, h, begin + i, 0}));
      }
    }
  }
  if (c.packed_gradients) {
    const std::vector<Tensor> packed =
        MakePacked(c.dtype, batch, {c.heads, c.heads, c.heads}, rows_q, c.dim);
    call.dq = packed[0];
    call.dk = packed[1];
    call.dv = packed[2];
  } else {
    call.dq = MakeTensor(c.dtype, q_sizes, Layout::kBshd);
    call.dk = MakeTensor(c.dtype, k_sizes, Layout::kBshd);
    call.dv = MakeTensor(c.dtype, v_sizes, Layout::kBshd);
  }
  if (c.bias) call.dbias = MakeTensor(c.dtype, bias_sizes, Layout::kPaddedRows);

  auto& p = call.params;
  p.struct_size = sizeof(p);
  p.query = call.q.view.data;
  p.key = call.k.view.data;
  p.value = call.v.view.data;
  p.bias = call.bias.view.data;
  p.logsumexp = static_cast<const float*>(call.lse.view.data);
  p.output = call.out.view.data;
  p.grad_output = call.dout.view.data;
  p.cu_seqlens_q = varlen ? call.cu_q.data() : nullptr;
  p.cu_seqlens_k = varlen ? call.cu_k.data() : nullptr;
  p.grad_query = call.dq.view.data;
  p.grad_key = call.dk.view.data;
  p.grad_value = call.dv.view.data;
  p.grad_bias = call.dbias.view.data;
  p.dtype = static_cast<int32_t>(c.dtype);
  p.scale = scale;
  p.num_batches = c.batch;
  p.num_queries = c.queries;
  p.num_keys = c.keys;
  p.num_heads = c.heads;
  p.head_dim = c.dim;
  p.head_dim_value = c.value_dim;
  p.custom_mask_type = c.mask_type;
  p.window_size = c.window;
  p.num_splits_key = 1;
  p.dropout_prob = c.dropout;
  p.rng_seed = 1248;
  p.rng_offset = 41;
  CopyStrides(call.q.view, p.q_strides);
  CopyStrides(call.k.view, p.k_strides);
  CopyStrides(call.v.view, p.v_strides);
  CopyStrides(call.out.view, p.o_strides);
  CopyStrides(call.dout.view, p.gO_strides);
  CopyStrides(call.dq.view, p.gQ_strides);
  CopyStrides(call.dk.view, p.gK_strides);
  CopyStrides(call.dv.view, p.gV_strides);
  CopyBiasStrides(call.bias.view, p.bias_strides);
  CopyBiasStrides(call.dbias.view, p.gB_strides);
  p.lse_strides[0] = call.lse.view.strides[0];
  p.lse_strides[1] = call.lse.view.strides[1];
  for (const Tensor* tensor : {&call.dq, &call.dk, &call.dv, &call.dbias})
    if (tensor->given()) tensor->buffer->Snapshot();
  return call;
}

void ExpectMemEfficientGradients(const MemEfficientCase& c,
                                 const MemEfficientCall& call) {
  // Scores are sums over the head dim in f32: their error grows with its root.
  const double terms = std::max(1.0, std::sqrt(c.dim / 4096.0));
  const double bound = Bound(c.dtype, c.dtype) * terms;
  ExpectGradient("grad_query", call.dq.view, call.truth.dq.view, bound);
  ExpectGradient("grad_key", call.dk.view, call.truth.dk.view, bound);
  ExpectGradient("grad_value", call.dv.view, call.truth.dv.view, bound);
  if (call.dbias.given()) {
    ExpectGradient("grad_bias", call.dbias.view, call.truth.dbias.view, bound);
    EXPECT_FALSE(call.dbias.buffer->ChangedOutside({call.dbias.view}));
  }
  for (const Tensor* tensor : {&call.dq, &call.dk, &call.dv}) {
    // Packed gradients share a buffer.
    std::vector<ConstTensorView> written;
    for (const Tensor* other : {&call.dq, &call.dk, &call.dv})
      if (other->buffer == tensor->buffer) written.push_back(other->view);
    EXPECT_FALSE(tensor->buffer->ChangedOutside(written));
  }
}

}  // namespace fa2::test
