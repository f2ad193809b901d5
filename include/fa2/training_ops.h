// SPDX-License-Identifier: Apache-2.0

// The kernels of a transformer's training step beside attention: transpose,
// softmax, RMS norm, rotary position embedding, SwiGLU, embedding gradient,
// cross entropy.
//
// Views. An array of rows is [.., .., rows, dim]: all dimensions but the last
// are rows, in row-major order, with any strides (those of an input may be
// negative or 0); the elements of a row are contiguous. Vectors (weight, ids,
// targets, loss) are [1, 1, 1, n]; ids and targets may have any stride. Any
// size may be 0; an array without elements may have no data.
//
// Types. f32, bf16, f16 or f64 where nothing else is said. Arithmetic is in f32
// or better, in f64 for f64, and a result is rounded once, when it is stored.
//
// Accumulating. Outputs are overwritten. A sum over rows (dweight, loss) has an
// accumulate_ field: true adds it to what the output holds, as several calls of
// one training step want it.
//
// Every function: the same bits for any number of threads; NaN and inf reach
// exactly the outputs that depend on them; an error for arguments that do not
// fit, for an output that overlaps an input or another output, and for an index
// out of range (the sentence names its position and value); kOutOfMemory where
// memory cannot be had; both with nothing written. A context of nullptr is
// Context::Default.
#ifndef FA2_TRAINING_OPS_H_
#define FA2_TRAINING_OPS_H_

#include <cstdint>
#include <optional>

#include "fa2/context.h"
#include "fa2/export.h"
#include "fa2/status.h"
#include "fa2/types.h"

namespace fa2 {

// out[.., .., c, r] = in[.., .., r, c]. in [B, H, rows, cols], out [B, H, cols,
// rows]; one type for both, any but bool.
FA2_EXPORT Status Transpose2d(const ConstTensorView& in, const TensorView& out,
                              Context* context = nullptr);

// y = exp(x - max(x)) / sum(exp(x - max(x))) by rows. x and y [.., .., rows,
// dim] of one type. A row of only -inf becomes NaN.
FA2_EXPORT Status Softmax(const ConstTensorView& x, const TensorView& y,
                          Context* context = nullptr);

// dx = y * (dy - sum(y * dy)) by rows, y being the result of Softmax. All
// [.., .., rows, dim] of one type.
FA2_EXPORT Status SoftmaxBackward(const ConstTensorView& dy,
                                  const ConstTensorView& y,
                                  const TensorView& dx,
                                  Context* context = nullptr);

// y = x * r * weight by rows with r = 1 / sqrt(mean(x^2) + eps) (Zhang and
// Sennrich 2019, arXiv:1910.07467). x and y [.., .., rows, dim] of one type;
// weight [1, 1, 1, dim] of that type or f32; eps finite and >= 0.
FA2_EXPORT Status RmsNorm(const ConstTensorView& x,
                          const ConstTensorView& weight, double eps,
                          const TensorView& y, Context* context = nullptr);

struct RmsNormBackwardArgs {
  // [.., .., rows, dim] of one type.
  ConstTensorView dy, x;
  // [1, 1, 1, dim], that type or f32.
  ConstTensorView weight;
  // Finite, >= 0.
  double eps = 1e-5;
  // dx = weight * r * dy - x * r^3 / dim * sum(x * weight * dy) by rows;
  // [.., .., rows, dim], the type of x. Optional.
  TensorView dx;
  // Sum over rows of x * r * dy; [1, 1, 1, dim], the type of x or f32.
  // Optional.
  TensorView dweight;
  // true: dweight is added to what it holds.
  bool accumulate_dweight = false;
};
FA2_EXPORT Status RmsNormBackward(const RmsNormBackwardArgs& args,
                                  Context* context = nullptr);

// Rotary position embedding (Su et al. 2021, arXiv:2104.09864). The first R
// elements of a row turn in pairs: with (a, b) elements (i, i + R / 2), or (2i,
// 2i + 1) when interleaved,
//   y_a = x_a cos_i - x_b sin_i,   y_b = x_b cos_i + x_a sin_i.
// The other dim - R elements are copied.
struct RotaryEmbeddingArgs {
  // [B, H, N, dim].
  ConstTensorView x;
  // [1, 1, N, R / 2] or [B, 1, N, R / 2] with R <= dim, in the type of x or
  // f32; one type for both.
  ConstTensorView cos, sin;
  bool interleaved = false;
  // The shape and type of x.
  TensorView y;
};
FA2_EXPORT Status RotaryEmbedding(const RotaryEmbeddingArgs& args,
                                  Context* context = nullptr);

// dx, the gradient of x: dy turned back. cos and sin have no gradient.
struct RotaryEmbeddingBackwardArgs {
  // [B, H, N, dim].
  ConstTensorView dy;
  // As in the forward.
  ConstTensorView cos, sin;
  bool interleaved = false;
  // The shape and type of dy.
  TensorView dx;
};
FA2_EXPORT Status RotaryEmbeddingBackward(
    const RotaryEmbeddingBackwardArgs& args, Context* context = nullptr);

// y = gate / (1 + exp(-gate)) * up (Shazeer 2020, arXiv:2002.05202). All [..,
// .., rows, dim] of one type.
FA2_EXPORT Status SwiGlu(const ConstTensorView& gate, const ConstTensorView& up,
                         const TensorView& y, Context* context = nullptr);

struct SwiGluBackwardArgs {
  // [.., .., rows, dim] of one type.
  ConstTensorView dy, gate, up;
  // With s = 1 / (1 + exp(-gate)): dgate = dy * up * s * (1 + gate * (1 - s)),
  // dup = dy * gate * s. The shape and type of gate; each optional.
  TensorView dgate, dup;
};
FA2_EXPORT Status SwiGluBackward(const SwiGluBackwardArgs& args,
                                 Context* context = nullptr);

struct EmbeddingBackwardArgs {
  // [.., .., tokens, dim].
  ConstTensorView dy;
  // i32 or i64 [1, 1, 1, tokens], one for every row of dy, in [0,
  // num_embeddings); may repeat.
  ConstTensorView ids;
  // Row r is the sum of dy[t] over all t with ids[t] = r, 0 where there is
  // none; [1, 1, num_embeddings, dim], the type of dy or f32.
  TensorView dweight;
  // true: dweight is added to what it holds; rows that no id names are left
  // alone.
  bool accumulate_dweight = false;
};
FA2_EXPORT Status EmbeddingBackward(const EmbeddingBackwardArgs& args,
                                    Context* context = nullptr);

// Softmax cross entropy, its value and its gradient in one pass over the
// logits. A position whose target is ignore_index counts for nothing.
struct CrossEntropyArgs {
  // [.., .., positions, vocab].
  ConstTensorView logits;
  // i32 or i64 [1, 1, 1, positions], each in [0, vocab) or ignore_index.
  ConstTensorView targets;
  int64_t ignore_index = -100;
  // What the sum is divided by, >= 0; not given: the number of positions that
  // are not ignored. Given as 0: the call does nothing.
  std::optional<int64_t> count;
  // Sum of -log(softmax(logits)[target]) / count; one element, f32 or f64.
  // Optional.
  TensorView loss;
  // true: loss is added to what it holds.
  bool accumulate_loss = false;
  // Gradient of the loss, without the above (softmax(logits) -
  // one_hot(target)) / count; 0 for ignored positions. The shape and type of
  // logits, and may be the logits themselves, in place. Optional.
  TensorView dlogits;
  // The target's share of the distribution that is learned is 1 -
  // label_smoothing + label_smoothing / vocab, that of any other id
  // label_smoothing / vocab; in [0, 1].
  double label_smoothing = 0.0;
  // Adds z_loss * logsumexp(logits)^2 to the loss of a position (Chowdhery et
  // al. 2022, arXiv:2204.02311); finite, >= 0.
  double z_loss = 0.0;
  // Factor of every position's loss and gradient; f32 or f64 [1, 1, 1,
  // positions]. It does not change count. Optional.
  ConstTensorView weights;
  // The loss of every position, not divided by count, 0 for ignored ones; f32
  // or f64 [1, 1, 1, positions]. Optional.
  TensorView losses;
  // The part of `loss` that z_loss added; as loss, and accumulated as loss is.
  // Optional.
  TensorView z_loss_part;
};
FA2_EXPORT Status CrossEntropy(const CrossEntropyArgs& args,
                               Context* context = nullptr);

}  // namespace fa2

#endif  // FA2_TRAINING_OPS_H_
