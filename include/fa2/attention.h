// SPDX-License-Identifier: Apache-2.0

// Scaled dot-product attention, forward and backward, for training on CPUs
// (FlashAttention-2, Dao 2023, arXiv:2307.08691).
//
// Shapes, as views with any strides (the last dimension is best contiguous;
// otherwise it is copied once):
//   q, dq                  [B, Hq, Nq, D]
//   k, dk                  [B, Hkv, Nk, D]
//   v, dv                  [B, Hkv, Nk, Dv]
//   out, dout              [B, Hq, Nq, Dv]
//   lse, dlse, delta       [B, Hq, Nq]
//   bias, dbias            [B or 1, Hq or 1, Nq or 1, Nk or 1]
//   alibi_slopes and grad  [B or 1, Hq, 1, 1]
//   sinks, dsinks          [1, Hq, 1, 1]
// Hq is a multiple of Hkv: query head h reads kv head h / (Hq / Hkv). Any size
// may be 0. A view of three dimensions is made by Dense or Strided of
// fa2/types.h with three sizes.
//
// Dtypes: q, k, v, out, dout share one of f32, bf16, f16, f64. lse, dlse and
// delta are f32 (f64 for f64 inputs). "Or f32" below is f64 for f64 inputs.
//
// Variable length: with cu_seqlens_q and cu_seqlens_k the rows of all sequences
// follow each other and B is 1 in every tensor above ("THD": Nq is total_q, Nk
// total_k). lse, dlse and delta are then one of
//   by rows                [1, Hq, total_q]
//   padded                 [sequences, Hq, longest or more]
#ifndef FA2_ATTENTION_H_
#define FA2_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "fa2/block_mask.h"
#include "fa2/context.h"
#include "fa2/export.h"
#include "fa2/status.h"
#include "fa2/types.h"

namespace fa2 {

enum class Causal : int32_t {
  kNone = 0,
  // Query i sees key j iff j <= i.
  kTopLeft = 1,
  // Query i sees key j iff j <= i + Nk - Nq.
  kBottomRight = 2,
};

// How products are rounded. The errors are relative L2 errors against exact
// arithmetic, before a result is rounded to its own dtype.
enum class Precision : int32_t {
  // bf16 inputs: products in bf16 with f32 sums, P and dS rounded to bf16
  // (2.5e-3). f16 inputs: P and dS may be two bf16 terms (1.5e-5).
  kFast = 0,
  // f32 inputs may use three products of two bf16 terms on a matrix unit
  // (1.5e-5); elsewhere as kFast.
  kHigh = 1,
  // P and dS stay f32 (3e-6).
  kExact = 2,
};

// What shapes the scores S = scale * Q K^T; then, in this order: softcap *
// tanh(S / softcap), + bias, + ALiBi, mask.
struct AttentionOptions {
  // Finite; not given: 1 / sqrt(D).
  std::optional<double> scale;

  Causal causal = Causal::kNone;

  // Keys in [i' - window_left, i' + window_right] are visible to query i, where
  // i' = i for kTopLeft and i + Nk - Nq otherwise; -1 is unbounded.
  int64_t window_left = -1;
  int64_t window_right = -1;

  // 0: none; else finite and > 0.
  double softcap = 0.0;

  // Additive (f32, bf16, f16, f64) or a boolean mask (false = -inf); -inf
  // masks. Not with cu_seqlens.
  ConstTensorView bias;

  // Blocks of queries x keys that are visible (fa2/block_mask.h). nullptr: all
  // of them. Read during the call only.
  const BlockMask* block_mask = nullptr;

  // f32: adds -slope * |i + Nk - Nq - j| (ALiBi, Press et al. 2021,
  // arXiv:2108.12409). Keys so far off that no P can reach 2^-100 (f64: 2^-960)
  // are skipped.
  ConstTensorView alibi_slopes;

  // f32: exp(sink) joins the softmax sum, with no value.
  ConstTensorView sinks;

  // In [0, 1]. Element (b, h, i, j) of P is kept, times 1 / (1 - p), iff u > p
  // where u = x * 2^-32 + 2^-33 in f32 and x is 32-bit output number
  // philox_offset + ((b * Hq + h) * Mq + i) * Mk + j of Philox4x32-10 (Salmon
  // et al. 2011) with key philox_seed. Mq and Mk are Nq and Nk, or the greatest
  // lengths where lengths vary, unless max_seqlen_q and max_seqlen_k say more.
  double dropout_p = 0.0;
  uint64_t philox_seed = 0;
  uint64_t philox_offset = 0;

  // Prefix sums of the sequences' lengths, in rows, from 0 to total_q and
  // total_k: i32 or i64 [1, 1, 1, sequences + 1]. Both or neither.
  ConstTensorView cu_seqlens_q;
  ConstTensorView cu_seqlens_k;

  // Mq and Mk above; 0: the longest sequence. A call for a part of an attention
  // draws the whole's mask with the whole's extents, and philox_offset moved on
  // by the number of its first element.
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;

  Precision precision = Precision::kFast;
};

struct AttentionForwardArgs {
  ConstTensorView q, k, v;
  AttentionOptions options;
  // The inputs' dtype, or f32.
  TensorView out;
  // Natural-log logsumexp of the masked scores; -inf in a row that sees no key.
  // Optional.
  TensorView lse;
};

struct AttentionBackwardArgs {
  ConstTensorView dout, q, k, v;
  // Optional, and not looked at, when delta is given.
  ConstTensorView out;
  // Of the forward; in a row that sees no key -inf, +inf and 0 are all
  // accepted.
  ConstTensorView lse;
  // Gradient of lse. Optional.
  ConstTensorView dlse;
  // rowsum(out * dout), without dlse. Optional: computed from out.
  ConstTensorView delta;
  AttentionOptions options;

  // Each gradient is optional. dq, dk, dv: the inputs' dtype, or f32. dbias:
  // bias's own shape (a sum over the dimensions that bias broadcasts) and
  // dtype, or f32. dalibi_slopes and dsinks: the shapes of their inputs, f32.
  TensorView dq, dk, dv, dbias, dalibi_slopes, dsinks;

  // true: the gradient is added to what the output holds.
  bool accumulate_dq = false;
  bool accumulate_dk = false;
  bool accumulate_dv = false;
  bool accumulate_dbias = false;
};

// Both return kInvalidArgument for arguments that do not fit, for an output
// that overlaps an input or another output; kOutOfMemory where workspace cannot
// be had or is over the context's limit. Nothing has then been written. A
// context of nullptr is Context::Default.
FA2_EXPORT Status AttentionForward(const AttentionForwardArgs& args,
                                   Context* context = nullptr);
FA2_EXPORT Status AttentionBackward(const AttentionBackwardArgs& args,
                                    Context* context = nullptr);

// Bytes of workspace that the call would take from the context. The errors are
// those of the call.
FA2_EXPORT Status AttentionForwardWorkspace(const AttentionForwardArgs& args,
                                            size_t* bytes,
                                            Context* context = nullptr);
FA2_EXPORT Status AttentionBackwardWorkspace(const AttentionBackwardArgs& args,
                                             size_t* bytes,
                                             Context* context = nullptr);

// The preprocess step of FlashAttention-2's backward (Dao 2023, algorithm 2,
// line 4): delta[b,h,i] = sum_d out[b,h,i,d] * dout[b,h,i,d], summed in f32
// (f64 for f64 inputs). out and dout [B, H, N, D] of one dtype; delta [B, H, N]
// f32 (f64 for f64), overwritten.
FA2_EXPORT Status AttentionDelta(const ConstTensorView& out,
                                 const ConstTensorView& dout,
                                 const TensorView& delta,
                                 Context* context = nullptr);

// The dropout mask that attention uses: keep[b,h,i,j] (kBool, dense [B, H, Nq,
// Nk]) by the mapping at AttentionOptions::dropout_p.
FA2_EXPORT Status PhiloxKeepMask(double dropout_p, uint64_t seed,
                                 uint64_t offset, const TensorView& keep,
                                 Context* context = nullptr);

}  // namespace fa2

#endif  // FA2_ATTENTION_H_
