// Scaled dot-product attention, forward and backward, for training on CPUs
// (FlashAttention-2, Dao 2023, arXiv:2307.08691).
//
// Shapes, as views of four dimensions with any strides (the last dimension is
// best contiguous; otherwise it is copied once):
//   q, dq        [B, Hq,  Nq, D ]      k, dk   [B, Hkv, Nk, D ]      v, dv  [B,
//   Hkv, Nk, Dv] out, dout    [B, Hq,  Nq, Dv]      lse, dlse, delta  [B, Hq,
//   Nq, 1]
// Hq is a multiple of Hkv: query head h reads kv head h / (Hq / Hkv). Any size
// may be 0. q, k, v, out, dout share one dtype of f32, bf16, f16, f64. lse,
// dlse and delta are f32 (f64 for f64 inputs).
//
// Variable length: with cu_seqlens_q and cu_seqlens_k (prefix sums, i32 or i64,
// shape [1, 1, 1, sequences + 1]) B is 1 in every tensor above and the rows of
// all sequences follow each other ("THD": Nq is total_q). lse, dlse and delta
// are then [1, Hq, total_q, 1], or padded: [sequences, Hq, >= longest, 1].
#ifndef FA2_ATTENTION_H_
#define FA2_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "fa2/context.h"
#include "fa2/export.h"
#include "fa2/status.h"
#include "fa2/types.h"

namespace fa2 {

enum class Causal : int32_t {
  kNone = 0,
  kTopLeft = 1,      // query i sees key j iff j <= i
  kBottomRight = 2,  // query i sees key j iff j <= i + Nk - Nq
};

enum class Precision : int32_t {
  kFast = 0,  // bf16 inputs: products in bf16 with f32 sums, P and dS rounded
              // to bf16 (relative L2 error <= 2.5e-3). f16 inputs: P and dS
              // may be two bf16 terms (<= 1.5e-5 before they are stored)
  kHigh = 1,  // f32 inputs may use three products of two bf16 terms on a matrix
              // unit (<= 1.5e-5); elsewhere as kFast
  kExact = 2,  // P and dS stay f32 (<= 3e-6)
};

// What shapes the scores S = scale * Q K^T; then, in this order: softcap *
// tanh(S / softcap), + bias, + ALiBi, mask.
struct AttentionOptions {
  std::optional<double> scale;  // finite; not given: 1 / sqrt(D)
  Causal causal = Causal::kNone;
  // Keys in [i' - window_left, i' + window_right] are visible to query i, where
  // i' = i for kTopLeft and i + Nk - Nq otherwise; -1 is unbounded.
  int64_t window_left = -1;
  int64_t window_right = -1;
  double softcap = 0.0;  // 0: none; else finite and > 0
  // Additive bias (f32, bf16, f16, f64) or boolean mask (false = -inf), [B or
  // 1, Hq or 1, Nq or 1, Nk or 1]; -inf masks.
  ConstTensorView bias;
  // f32 [B or 1, Hq, 1, 1]: adds -slope * |i + Nk - Nq - j|. Keys so far off
  // that no P can reach 2^-100 (f64: 2^-960) are skipped.
  ConstTensorView alibi_slopes;
  ConstTensorView sinks;  // f32 [1, Hq, 1, 1]: exp(sink) joins the softmax sum,
                          // with no value
  // Element (b, h, i, j) of P is kept, times 1 / (1 - p), iff u > p where u = x
  // * 2^-32 + 2^-33 in f32 and x is 32-bit output number philox_offset + ((b *
  // Hq + h) * Mq + i) * Mk + j of Philox4x32-10 (Salmon et al. 2011) with key
  // philox_seed. Mq and Mk are Nq and Nk, or the greatest lengths where lengths
  // vary.
  double dropout_p = 0.0;
  uint64_t philox_seed = 0;
  uint64_t philox_offset = 0;
  ConstTensorView cu_seqlens_q;  // both or neither
  ConstTensorView cu_seqlens_k;
  int64_t max_seqlen_q =
      0;  // Mq and Mk above where lengths vary; 0: the longest sequence
  int64_t max_seqlen_k = 0;
  Precision precision = Precision::kFast;
};

struct AttentionForwardArgs {
  ConstTensorView q, k, v;
  AttentionOptions options;
  TensorView out;  // the inputs' dtype, or f32 (f64 for f64 inputs)
  TensorView lse;  // natural-log logsumexp of the masked scores; -inf in a row
                   // that sees no key; may be left out
};

struct AttentionBackwardArgs {
  ConstTensorView dout, q, k, v;
  ConstTensorView out;   // may be left out when delta is given
  ConstTensorView lse;   // of the forward; in a row that sees no key -inf, +inf
                         // and 0 are all accepted
  ConstTensorView dlse;  // optional gradient of lse
  ConstTensorView delta;  // optional rowsum(out * dout), without dlse; computed
                          // from out when left out
  AttentionOptions options;
  // Each gradient is optional; dtype is the input's, or f32 (f64 for f64
  // inputs). dbias has bias's own shape and is summed over the dimensions that
  // bias broadcasts; dalibi_slopes and dsinks have the shapes of their inputs,
  // f32.
  TensorView dq, dk, dv, dbias, dalibi_slopes, dsinks;
  // true: the gradient is added to what the output holds.
  bool accumulate_dq = false;
  bool accumulate_dk = false;
  bool accumulate_dv = false;
  bool accumulate_dbias = false;
};

// Both return an error, with nothing written, for arguments that do not fit;
// context nullptr means Context::Default.
FA2_EXPORT Status AttentionForward(const AttentionForwardArgs& args,
                                   Context* context = nullptr);
FA2_EXPORT Status AttentionBackward(const AttentionBackwardArgs& args,
                                    Context* context = nullptr);

// Bytes of workspace that the call would take from the context.
FA2_EXPORT Status AttentionForwardWorkspace(const AttentionForwardArgs& args,
                                            size_t* bytes,
                                            Context* context = nullptr);
FA2_EXPORT Status AttentionBackwardWorkspace(const AttentionBackwardArgs& args,
                                             size_t* bytes,
                                             Context* context = nullptr);

// The D pre-pass of FlashAttention-2: delta[b,h,i] = sum_d out[b,h,i,d] *
// dout[b,h,i,d], summed in f32 (f64 for f64 inputs). out and dout [B, H, N, D]
// of one dtype; delta [B, H, N, 1] f32 (f64 for f64).
FA2_EXPORT Status AttentionDelta(const ConstTensorView& out,
                                 const ConstTensorView& dout,
                                 const TensorView& delta,
                                 Context* context = nullptr);

// The dropout mask that attention uses: keep[b,h,i,j] (kBool, dense [B, H, Nq,
// Nk]) by the mapping at dropout_p.
FA2_EXPORT Status PhiloxKeepMask(double dropout_p, uint64_t seed,
                                 uint64_t offset, const TensorView& keep,
                                 Context* context = nullptr);

}  // namespace fa2

#endif  // FA2_ATTENTION_H_
