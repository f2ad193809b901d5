// SPDX-License-Identifier: Apache-2.0
#include "src/reference/check.h"

#include <algorithm>
#include <array>
#include <string>

#include "src/reference/block_mask.h"
#include "src/reference/sequences.h"
#include "src/reference/tensor_access.h"

namespace fa2::reference {
namespace {

using Sizes = std::array<int64_t, 4>;

std::string Text(const Sizes& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  }
  return text + "]";
}

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 ||
         dtype == DType::kF16 || dtype == DType::kF64;
}

Status Wrong(const char* name, const ConstTensorView& view,
             const std::string& must) {
  return Status::InvalidArgument(std::string(name) + " is " +
                                 NameOf(view.dtype) + " " + Text(view.sizes) +
                                 " but must be " + must);
}

// A float tensor of these sizes; `optional` lets a view that is not given pass.
// A view of no elements may have a null pointer.
Status CheckTensor(const char* name, const ConstTensorView& view,
                   const Sizes& sizes, bool optional) {
  if (!view.given()) {
    const bool empty = view.sizes == sizes &&
                       std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    if (optional || empty) return Status::Ok();
    return Status::InvalidArgument(std::string(name) +
                                   " is not given but must be a tensor of " +
                                   Text(sizes));
  }
  if (view.sizes != sizes || !IsFloat(view.dtype)) {
    return Wrong(name, view, "a float tensor of " + Text(sizes));
  }
  return Status::Ok();
}

// Sizes may be 1 where the full size is not.
Status CheckBroadcast(const char* name, const ConstTensorView& view,
                      const Sizes& full, bool boolean) {
  if (!view.given()) return Status::Ok();
  bool fits = IsFloat(view.dtype) || (boolean && view.dtype == DType::kBool);
  for (size_t i = 0; i < full.size(); ++i) {
    if (view.sizes[i] != 1 && view.sizes[i] != full[i]) fits = false;
  }
  if (fits) return Status::Ok();
  return Wrong(name, view, "a float tensor that broadcasts to " + Text(full));
}

Status CheckPrefixSums(const char* name, const ConstTensorView& cu,
                       int64_t total) {
  const bool shaped = (cu.dtype == DType::kI32 || cu.dtype == DType::kI64) &&
                      cu.sizes[0] == 1 && cu.sizes[1] == 1 &&
                      cu.sizes[2] == 1 && cu.sizes[3] >= 1;
  if (!shaped) {
    return Wrong(name, cu, "i32 or i64 of [1, 1, 1, sequences + 1]");
  }
  int64_t previous = 0;
  for (int64_t n = 0; n < cu.sizes[3]; ++n) {
    const int64_t value = static_cast<int64_t>(Load(cu, 0, 0, 0, n));
    if (value < previous || value > total || (n == 0 && value != 0)) {
      return Status::InvalidArgument(
          std::string(name) + "[" + std::to_string(n) + "] is " +
          std::to_string(value) + " but must ascend from 0 to at most " +
          std::to_string(total) + " rows");
    }
    previous = value;
  }
  return Status::Ok();
}

// lse, dlse, delta: per row, or padded per sequence.
Status CheckStatistic(const char* name, const ConstTensorView& view,
                      const ConstTensorView& q, const ConstTensorView& k,
                      const AttentionOptions& options, bool optional) {
  const Sizes rows = {q.sizes[0], q.sizes[1], q.sizes[2], 1};
  if (view.given() && IsFloat(view.dtype) && options.cu_seqlens_q.given()) {
    const Sequences sequences = SequencesOf(q, k, options);
    int64_t longest = 0;
    for (const Sequence& s : sequences.list) longest = std::max(longest, s.nq);
    if (view.sizes[0] == static_cast<int64_t>(sequences.list.size()) &&
        view.sizes[1] == q.sizes[1] && view.sizes[2] >= longest &&
        view.sizes[3] == 1) {
      return Status::Ok();
    }
  }
  return CheckTensor(name, view, rows, optional);
}

#define FA2_REFERENCE_RETURN_IF_ERROR(expression)                  \
  do {                                                             \
    if (Status status = (expression); !status.ok()) return status; \
  } while (false)

Status CheckInputs(const ConstTensorView& q, const ConstTensorView& k,
                   const ConstTensorView& v, const AttentionOptions& options) {
  const auto [batch, heads, nq, head_dim] = q.sizes;
  const int64_t kv_heads = k.sizes[1];
  const int64_t nk = k.sizes[2];
  FA2_REFERENCE_RETURN_IF_ERROR(CheckTensor("q", q, q.sizes, false));
  FA2_REFERENCE_RETURN_IF_ERROR(
      CheckTensor("k", k, {batch, kv_heads, nk, head_dim}, false));
  FA2_REFERENCE_RETURN_IF_ERROR(
      CheckTensor("v", v, {batch, kv_heads, nk, v.sizes[3]}, false));
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
    return Status::InvalidArgument("q has " + std::to_string(heads) +
                                   " heads but must have a multiple of k's " +
                                   std::to_string(kv_heads));
  }
  const bool packed = options.cu_seqlens_q.given();
  if (packed != options.cu_seqlens_k.given()) {
    return Status::InvalidArgument(
        "cu_seqlens_q and cu_seqlens_k must be given together");
  }
  int64_t sequences = batch;
  if (packed) {
    FA2_REFERENCE_RETURN_IF_ERROR(
        CheckPrefixSums("cu_seqlens_q", options.cu_seqlens_q, nq));
    FA2_REFERENCE_RETURN_IF_ERROR(
        CheckPrefixSums("cu_seqlens_k", options.cu_seqlens_k, nk));
    sequences = options.cu_seqlens_q.sizes[3] - 1;
    if (batch != 1 || options.cu_seqlens_k.sizes[3] != sequences + 1) {
      return Status::InvalidArgument(
          "with cu_seqlens the batch size must be 1, and cu_seqlens_q and "
          "cu_seqlens_k must have the same length");
    }
    if (options.bias.given()) {
      return Status::InvalidArgument(
          "bias must not be given together with cu_seqlens");
    }
  }
  if (options.block_mask != nullptr) {
    FA2_REFERENCE_RETURN_IF_ERROR(CheckBlockMask(*options.block_mask, q, k));
  }
  FA2_REFERENCE_RETURN_IF_ERROR(
      CheckBroadcast("bias", options.bias, {batch, heads, nq, nk}, true));
  FA2_REFERENCE_RETURN_IF_ERROR(CheckBroadcast(
      "alibi_slopes", options.alibi_slopes, {sequences, heads, 1, 1}, false));
  return CheckBroadcast("sinks", options.sinks, {1, heads, 1, 1}, false);
}

}  // namespace

Status CheckForward(const AttentionForwardArgs& args) {
  FA2_REFERENCE_RETURN_IF_ERROR(
      CheckInputs(args.q, args.k, args.v, args.options));
  FA2_REFERENCE_RETURN_IF_ERROR(CheckTensor(
      "out", args.out,
      {args.q.sizes[0], args.q.sizes[1], args.q.sizes[2], args.v.sizes[3]},
      false));
  return CheckStatistic("lse", args.lse, args.q, args.k, args.options, true);
}

Status CheckBackward(const AttentionBackwardArgs& args) {
  FA2_REFERENCE_RETURN_IF_ERROR(
      CheckInputs(args.q, args.k, args.v, args.options));
  const Sizes out_sizes = {args.q.sizes[0], args.q.sizes[1], args.q.sizes[2],
                           args.v.sizes[3]};
  const auto statistic = [&](const char* name, const ConstTensorView& view,
                             bool optional) {
    return CheckStatistic(name, view, args.q, args.k, args.options, optional);
  };
  FA2_REFERENCE_RETURN_IF_ERROR(
      CheckTensor("dout", args.dout, out_sizes, false));
  FA2_REFERENCE_RETURN_IF_ERROR(
      CheckTensor("out", args.out, out_sizes, args.delta.given()));
  FA2_REFERENCE_RETURN_IF_ERROR(statistic("lse", args.lse, false));
  FA2_REFERENCE_RETURN_IF_ERROR(statistic("dlse", args.dlse, true));
  FA2_REFERENCE_RETURN_IF_ERROR(statistic("delta", args.delta, true));
  FA2_REFERENCE_RETURN_IF_ERROR(CheckTensor("dq", args.dq, args.q.sizes, true));
  FA2_REFERENCE_RETURN_IF_ERROR(CheckTensor("dk", args.dk, args.k.sizes, true));
  FA2_REFERENCE_RETURN_IF_ERROR(CheckTensor("dv", args.dv, args.v.sizes, true));
  // The gradient of an input that is not given has no shape that fits.
  FA2_REFERENCE_RETURN_IF_ERROR(
      CheckTensor("dbias", args.dbias, args.options.bias.sizes, true));
  FA2_REFERENCE_RETURN_IF_ERROR(CheckTensor("dalibi_slopes", args.dalibi_slopes,
                                            args.options.alibi_slopes.sizes,
                                            true));
  return CheckTensor("dsinks", args.dsinks, args.options.sinks.sizes, true);
}

}  // namespace fa2::reference
