// SPDX-License-Identifier: Apache-2.0

/* The causal_attention_backward kernel of an f32 trainer's Metal shaders:
 * gradients from q, k, v and dout alone. Its other kernels (transpose_2d,
 * softmax_backward, rms_norm_backward, embedding_backward,
 * cross_entropy_fwd_bwd) are functions of fa2_c.h.
 *
 * All data is host memory. Errors and messages are those of fa2_c.h.
 */
#ifndef FA2_COMPAT_CAUSAL_ATTENTION_H_
#define FA2_COMPAT_CAUSAL_ATTENTION_H_

#include "fa2/fa2_c.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gradients of causal (top-left: query i sees key j iff j <= i) self-attention
 * with scale 1 / sqrt(head_dim). The softmax is computed again inside, so that
 * neither the forward's output nor its logsumexp is needed; any length. Heads
 * lie beside each other in a row; the last dimension is contiguous. One dtype
 * for all: f32, bf16, f16 or f64. */
typedef struct fa2_causal_attention_backward_args {
  size_t struct_size;
  /* A multiple of num_kv_heads: head h reads kv head
   * h / (num_heads / num_kv_heads). Both at least 1. */
  int64_t num_heads;
  int64_t num_kv_heads;
  /* [1, B, seq, num_heads * head_dim]. */
  fa2_const_tensor dout, q;
  /* [1, B, seq, num_kv_heads * head_dim]. */
  fa2_const_tensor k, v;
  /* In the inputs' dtype or f32 (f64 for f64), each may be left out. */
  fa2_tensor dq, dk, dv;
  /* Not 0: dk and dv are added to what they hold, as that kernel's always are.
   * dq is overwritten. */
  int32_t accumulate_dk;
  int32_t accumulate_dv;
  /* FA2_PRECISION_... */
  int32_t precision;
  /* 0. */
  int32_t reserved;
} fa2_causal_attention_backward_args;

FA2_EXPORT fa2_status fa2_causal_attention_backward(
    const fa2_causal_attention_backward_args* args, fa2_context* context);

#ifdef __cplusplus
} /* extern "C" */

#include "fa2/context.h"
#include "fa2/status.h"

namespace fa2 {

// The same call with a C++ context.
FA2_EXPORT Status CausalAttentionBackward(
    const fa2_causal_attention_backward_args& args, Context* context = nullptr);

}  // namespace fa2
#endif

#endif /* FA2_COMPAT_CAUSAL_ATTENTION_H_ */
