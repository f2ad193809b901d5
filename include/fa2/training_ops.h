// The kernels of a transformer's training step beside attention: transpose,
// softmax, RMS norm, rotary position embedding, SwiGLU, embedding gradient,
// cross entropy, and causal self-attention whose backward needs nothing from
// the forward.
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
// Accumulating. Sums over rows (dweight, loss, dk, dv) are added to what the
// output holds, as several calls of one training step want it; accumulate =
// false overwrites. Other outputs are overwritten.
//
// Every function: the same bits for any number of threads; NaN and inf reach
// exactly the outputs that depend on them; an error for arguments that do not
// fit, for an output that overlaps an input or another output, and for an index
// out of range (the sentence names its position and value), with nothing
// written. Context nullptr means Context::Default.
#ifndef FA2_TRAINING_OPS_H_
#define FA2_TRAINING_OPS_H_

#include <cstdint>
#include <optional>

#include "fa2/attention.h"
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
  ConstTensorView dy, x;   // [.., .., rows, dim] of one type
  ConstTensorView weight;  // [1, 1, 1, dim], that type or f32
  double eps = 1e-5;       // finite, >= 0
  // dx = weight * r * dy - x * r^3 / dim * sum(x * weight * dy) by rows;
  // [.., .., rows, dim], the type of x. Optional.
  TensorView dx;
  // dweight (+)= sum over rows of x * r * dy; [1, 1, 1, dim], the type of x or
  // f32. Optional.
  TensorView dweight;
  bool accumulate_dweight = true;
};
FA2_EXPORT Status RmsNormBackward(const RmsNormBackwardArgs& args,
                                  Context* context = nullptr);

// Rotary position embedding (Su et al. 2021, arXiv:2104.09864). The first R
// elements of a row turn in pairs: with (a, b) elements (i, i + R / 2), or (2i,
// 2i + 1) when interleaved,
//   y_a = x_a cos_i - x_b sin_i,   y_b = x_b cos_i + x_a sin_i.
// The other dim - R elements are copied.
struct RotaryEmbeddingArgs {
  ConstTensorView x;  // [B, H, N, dim]
  // [1, 1, N, R / 2] or [B, 1, N, R / 2] with R <= dim, in the type of x or
  // f32; one type for both.
  ConstTensorView cos, sin;
  bool interleaved = false;
  TensorView y;  // the shape and type of x
};
FA2_EXPORT Status RotaryEmbedding(const RotaryEmbeddingArgs& args,
                                  Context* context = nullptr);

// dx, the gradient of x: dy turned back. cos and sin have no gradient.
struct RotaryEmbeddingBackwardArgs {
  ConstTensorView dy;        // [B, H, N, dim]
  ConstTensorView cos, sin;  // as in the forward
  bool interleaved = false;
  TensorView dx;  // the shape and type of dy
};
FA2_EXPORT Status RotaryEmbeddingBackward(
    const RotaryEmbeddingBackwardArgs& args, Context* context = nullptr);

// y = gate / (1 + exp(-gate)) * up (Shazeer 2020, arXiv:2002.05202). All [..,
// .., rows, dim] of one type.
FA2_EXPORT Status SwiGlu(const ConstTensorView& gate, const ConstTensorView& up,
                         const TensorView& y, Context* context = nullptr);

struct SwiGluBackwardArgs {
  ConstTensorView dy, gate, up;  // [.., .., rows, dim] of one type
  // With s = 1 / (1 + exp(-gate)): dgate = dy * up * s * (1 + gate * (1 - s)),
  // dup = dy * gate * s. The shape and type of gate; each optional.
  TensorView dgate, dup;
};
FA2_EXPORT Status SwiGluBackward(const SwiGluBackwardArgs& args,
                                 Context* context = nullptr);

struct EmbeddingBackwardArgs {
  ConstTensorView dy;  // [.., .., tokens, dim]
  // i32 or i64 [1, 1, 1, tokens], one for every row of dy, in [0,
  // num_embeddings); may repeat.
  ConstTensorView ids;
  // dweight[ids[t]] (+)= dy[t]; [1, 1, num_embeddings, dim], the type of dy or
  // f32. Rows that no id names are left alone, or 0 when not accumulating.
  TensorView dweight;
  bool accumulate_dweight = true;
};
FA2_EXPORT Status EmbeddingBackward(const EmbeddingBackwardArgs& args,
                                    Context* context = nullptr);

// Softmax cross entropy, its value and its gradient in one pass over the
// logits. A position whose target is ignore_index counts for nothing.
struct CrossEntropyArgs {
  ConstTensorView logits;  // [.., .., positions, vocab]
  // i32 or i64 [1, 1, 1, positions], each in [0, vocab) or ignore_index.
  ConstTensorView targets;
  int64_t ignore_index = -100;
  // What the sum is divided by, >= 0; not given: the number of positions that
  // are not ignored. Given as 0: the call does nothing.
  std::optional<int64_t> count;
  // loss (+)= sum of -log(softmax(logits)[target]) / count; one element, f32 or
  // f64. Optional.
  TensorView loss;
  bool accumulate_loss = true;
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

// Gradients of causal (top-left: query i sees key j iff j <= i) self-attention
// with scale 1 / sqrt(head_dim). The softmax is computed again inside, so
// neither the forward's output nor its logsumexp is needed; any length. One
// type for all (f32, bf16, f16, f64), last dimension contiguous.
struct CausalAttentionBackwardArgs {
  int64_t num_heads = 0;     // a multiple of num_kv_heads; head h reads kv head
  int64_t num_kv_heads = 0;  // h / (num_heads / num_kv_heads)
  ConstTensorView dout, q;   // [1, B, seq, num_heads * head_dim]
  ConstTensorView k, v;      // [1, B, seq, num_kv_heads * head_dim]
  // Gradients in the inputs' type or f32 (f64 for f64), each optional. dq is
  // overwritten.
  TensorView dq, dk, dv;
  bool accumulate_dk = true;
  bool accumulate_dv = true;
  Precision precision = Precision::kFast;
};
FA2_EXPORT Status CausalAttentionBackward(
    const CausalAttentionBackwardArgs& args, Context* context = nullptr);

}  // namespace fa2

#endif  // FA2_TRAINING_OPS_H_
