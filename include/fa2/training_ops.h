// The kernels of a transformer's training step beside attention: transpose,
// softmax, RMS norm, embedding gradient, cross entropy, and causal
// self-attention whose backward needs nothing from the forward.
//
// Views. An array of rows is [.., .., rows, dim]: all dimensions but the last
// are rows, in row-major order, with any strides (those of an input may be
// negative or 0); the elements of a row are contiguous. Vectors (weight, ids,
// targets, loss) are [1, 1, 1, n]; ids and targets may have any stride. Any
// size may be 0; an array without elements may have no data.
//
// Types. f32 or bf16 where nothing else is said. All arithmetic is in f32 or
// better, and a result is rounded once, when it is stored.
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
  // (softmax(logits) - one_hot(target)) / count, 0 for ignored positions;
  // the shape and type of logits. Optional.
  TensorView dlogits;
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
