// SPDX-License-Identifier: Apache-2.0
#include "fa2/compat/mem_efficient_attention.h"

#include <string>

#include "fa2/attention.h"
#include "src/c_api/boundary.h"
#include "src/compat/checks.h"

namespace fa2::compat {
namespace {

using Params = fa2_mem_efficient_backward_params;
// With pointers of 64 bits, as its callers have.
static_assert(sizeof(void*) != 8 ||
              sizeof(Params) == 8 + 13 * 8 + 12 * 4 + 2 * 8 + 32 * 8);
static_assert(sizeof(void*) != 8 || (offsetof(Params, dtype) == 112 &&
                                     offsetof(Params, q_strides) == 176 &&
                                     offsetof(Params, gB_strides) == 408));

constexpr int32_t kMaxHeadDim = 65536;
// The least number of keys in one block of that kernel: a caller may have
// asked for one split a block.
constexpr int32_t kBlockKeys = 64;

Status CheckScalars(const Params& p) {
  const struct {
    const char* name;
    int32_t value;
    int32_t most;
  } extents[] = {{"num_batches", p.num_batches, INT32_MAX},
                 {"num_queries", p.num_queries, INT32_MAX},
                 {"num_keys", p.num_keys, INT32_MAX},
                 {"num_heads", p.num_heads, INT32_MAX},
                 {"head_dim", p.head_dim, kMaxHeadDim},
                 {"head_dim_value", p.head_dim_value, kMaxHeadDim}};
  for (const auto& extent : extents) {
    if (extent.value <= 0 || extent.value > extent.most) {
      return Invalid(extent.name, std::to_string(extent.value),
                     extent.most == INT32_MAX
                         ? "1 or more"
                         : "1 to " + std::to_string(extent.most));
    }
  }
  if (p.custom_mask_type < FA2_MEM_EFFICIENT_NO_MASK ||
      p.custom_mask_type > FA2_MEM_EFFICIENT_CAUSAL_FROM_BOTTOM_RIGHT) {
    return Invalid("custom_mask_type", std::to_string(p.custom_mask_type),
                   "0 (none), 1 (causal from the top left) or 2 (causal from "
                   "the bottom right)");
  }
  if (p.window_size > 0 && p.custom_mask_type == FA2_MEM_EFFICIENT_NO_MASK) {
    return Invalid("window_size", std::to_string(p.window_size),
                   "0 where custom_mask_type is 0: a window needs a causal "
                   "mask type");
  }
  // Written so that NaN is refused too.
  if (!(p.dropout_prob >= 0.0f && p.dropout_prob <= 1.0f)) {
    return Invalid("dropout_prob", std::to_string(p.dropout_prob), "in [0, 1]");
  }
  const int32_t blocks = (p.num_keys - 1) / kBlockKeys + 1;
  if (p.num_splits_key <= 0 || p.num_splits_key > blocks) {
    return Invalid("num_splits_key", std::to_string(p.num_splits_key),
                   "1 to " + std::to_string(blocks) +
                       ", the blocks of 64 in num_keys " +
                       std::to_string(p.num_keys));
  }
  return Status::Ok();
}

Status CheckPointers(const Params& p, DType dtype) {
  const struct {
    const char* name;
    const void* data;
  } tensors[] = {{"query", p.query},
                 {"key", p.key},
                 {"value", p.value},
                 {"output", p.output},
                 {"grad_output", p.grad_output},
                 {"grad_query", p.grad_query},
                 {"grad_key", p.grad_key},
                 {"grad_value", p.grad_value}};
  for (const auto& tensor : tensors) {
    Status status = CheckPointer(tensor.name, tensor.data, dtype);
    if (!status.ok()) return status;
  }
  Status status = CheckPointer("logsumexp", p.logsumexp, DType::kF32);
  if (status.ok() && p.bias != nullptr)
    status = CheckPointer("bias", p.bias, dtype);
  if (status.ok() && p.grad_bias != nullptr) {
    status = CheckPointer("grad_bias", p.grad_bias, dtype);
    if (status.ok() && p.bias == nullptr) {
      status = Invalid("bias", "NULL", "given where grad_bias is");
    }
  }
  return status;
}

// B + 1 prefix sums: from 0, never falling, no step over `longest`.
Status CheckPrefixSums(const char* name, const int32_t* sums, int32_t count,
                       const char* longest_name, int32_t longest) {
  const std::string at = std::string(name) + "[";
  if (sums[0] != 0) return Invalid(at + "0]", std::to_string(sums[0]), "0");
  for (int32_t i = 1; i <= count; ++i) {
    const int64_t length = int64_t{sums[i]} - sums[i - 1];
    if (length < 0 || length > longest) {
      return Invalid(at + std::to_string(i) + "]", std::to_string(sums[i]),
                     "from " + std::to_string(sums[i - 1]) +
                         " (the one before it) to " +
                         std::to_string(int64_t{sums[i - 1]} + longest) + " (" +
                         longest_name + " more)");
    }
  }
  return Status::Ok();
}

Status CheckSequences(const Params& p) {
  if ((p.cu_seqlens_q == nullptr) != (p.cu_seqlens_k == nullptr)) {
    return Invalid(p.cu_seqlens_q == nullptr ? "cu_seqlens_q" : "cu_seqlens_k",
                   "NULL", "given where the other cu_seqlens is");
  }
  if (p.cu_seqlens_q == nullptr) return Status::Ok();
  if (p.bias != nullptr) {
    return Invalid("bias", "given", "NULL where cu_seqlens are given");
  }
  Status status = CheckPointer("cu_seqlens_q", p.cu_seqlens_q, DType::kI32);
  if (status.ok())
    status = CheckPointer("cu_seqlens_k", p.cu_seqlens_k, DType::kI32);
  if (status.ok()) {
    status = CheckPrefixSums("cu_seqlens_q", p.cu_seqlens_q, p.num_batches,
                             "num_queries", p.num_queries);
  }
  if (status.ok()) {
    status = CheckPrefixSums("cu_seqlens_k", p.cu_seqlens_k, p.num_batches,
                             "num_keys", p.num_keys);
  }
  return status;
}

// [batch, rows, heads, columns] by (batch, row, head) strides, as [batch,
// heads, rows, columns].
template <class View, class Pointer>
View RowsOfHeads(Pointer data, DType dtype, int64_t batch, int64_t heads,
                 int64_t rows, int64_t columns, const int64_t (&strides)[3]) {
  return {data,
          dtype,
          {batch, heads, rows, columns},
          {strides[0], strides[2], strides[1], 1}};
}

AttentionBackwardArgs ToArgs(const Params& p, DType dtype) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  const int64_t batch = varlen ? 1 : p.num_batches;
  const int64_t queries =
      varlen ? p.cu_seqlens_q[p.num_batches] : p.num_queries;
  const int64_t keys = varlen ? p.cu_seqlens_k[p.num_batches] : p.num_keys;
  const auto in = [&](const void* data, int64_t rows, int64_t columns,
                      const int64_t(&strides)[3]) {
    return RowsOfHeads<ConstTensorView>(data, dtype, batch, p.num_heads, rows,
                                        columns, strides);
  };
  const auto out = [&](void* data, int64_t rows, int64_t columns,
                       const int64_t(&strides)[3]) {
    return RowsOfHeads<TensorView>(data, dtype, batch, p.num_heads, rows,
                                   columns, strides);
  };
  AttentionBackwardArgs args;
  args.q = in(p.query, queries, p.head_dim, p.q_strides);
  args.k = in(p.key, keys, p.head_dim, p.k_strides);
  args.v = in(p.value, keys, p.head_dim_value, p.v_strides);
  args.out = in(p.output, queries, p.head_dim_value, p.o_strides);
  args.dout = in(p.grad_output, queries, p.head_dim_value, p.gO_strides);
  args.lse = Strided(p.logsumexp, DType::kF32,
                     {p.num_batches, p.num_heads, p.num_queries},
                     {p.lse_strides[0], p.lse_strides[1], 1});
  args.dq = out(p.grad_query, queries, p.head_dim, p.gQ_strides);
  args.dk = out(p.grad_key, keys, p.head_dim, p.gK_strides);
  args.dv = out(p.grad_value, keys, p.head_dim_value, p.gV_strides);

  AttentionOptions& options = args.options;
  options.scale = p.scale;
  if (p.custom_mask_type == FA2_MEM_EFFICIENT_CAUSAL_FROM_TOP_LEFT)
    options.causal = Causal::kTopLeft;
  if (p.custom_mask_type == FA2_MEM_EFFICIENT_CAUSAL_FROM_BOTTOM_RIGHT)
    options.causal = Causal::kBottomRight;
  // The diagonal's own key is one of the w.
  if (p.window_size > 0) options.window_left = p.window_size - 1;
  options.dropout_p = p.dropout_prob;
  options.philox_seed = p.rng_seed;
  options.philox_offset = p.rng_offset;
  if (p.bias != nullptr) {
    options.bias = {
        p.bias,
        dtype,
        {p.num_batches, p.num_heads, p.num_queries, p.num_keys},
        {p.bias_strides[0], p.bias_strides[1], p.bias_strides[2], 1}};
  }
  if (p.grad_bias != nullptr) {
    args.dbias = {p.grad_bias,
                  dtype,
                  {p.num_batches, p.num_heads, p.num_queries, p.num_keys},
                  {p.gB_strides[0], p.gB_strides[1], p.gB_strides[2], 1}};
  }
  if (varlen) {
    const int64_t sums = int64_t{p.num_batches} + 1;
    options.cu_seqlens_q = Dense(p.cu_seqlens_q, DType::kI32, 1, 1, 1, sums);
    options.cu_seqlens_k = Dense(p.cu_seqlens_k, DType::kI32, 1, 1, 1, sums);
    options.max_seqlen_q = p.num_queries;
    options.max_seqlen_k = p.num_keys;
  }
  return args;
}

Status Backward(const Params* given, fa2_context* context) {
  Params p = {};
  Status status = c_api::ReadStruct("params", given, sizeof(Params), &p);
  if (!status.ok()) return status;
  if (p.dtype != FA2_F32 && p.dtype != FA2_F16 && p.dtype != FA2_BF16) {
    return Invalid("dtype", std::to_string(p.dtype),
                   "FA2_F32 (0), FA2_BF16 (1) or FA2_F16 (2)");
  }
  const DType dtype = static_cast<DType>(p.dtype);
  status = CheckScalars(p);
  if (status.ok()) status = CheckPointers(p, dtype);
  if (status.ok()) status = CheckSequences(p);
  if (!status.ok()) return status;
  return AttentionBackward(ToArgs(p, dtype), c_api::ToContext(context));
}

}  // namespace
}  // namespace fa2::compat

extern "C" fa2_status fa2_mem_efficient_attention_backward(
    const fa2_mem_efficient_backward_params* params, fa2_context* context) {
  return fa2::c_api::Guard("fa2_mem_efficient_attention_backward", [&] {
    return fa2::compat::Backward(params, context);
  });
}
