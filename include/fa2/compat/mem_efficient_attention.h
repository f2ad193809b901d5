// SPDX-License-Identifier: Apache-2.0

/* The memory-efficient attention backward of PyTorch
 * (_efficient_attention_backward) and of xFormers (efficient_attention_backward
 * of CUTLASS), called with the parameters of that kernel.
 *
 * All pointers are host memory. Errors and messages are those of fa2_c.h.
 */
#ifndef FA2_COMPAT_MEM_EFFICIENT_ATTENTION_H_
#define FA2_COMPAT_MEM_EFFICIENT_ATTENTION_H_

#include "fa2/fa2_c.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  FA2_MEM_EFFICIENT_NO_MASK = 0,
  FA2_MEM_EFFICIENT_CAUSAL_FROM_TOP_LEFT = 1,
  FA2_MEM_EFFICIENT_CAUSAL_FROM_BOTTOM_RIGHT = 2
};

/* Strides are in elements for (batch, row, head) unless said otherwise; the
 * last dimension is contiguous. B, Mq, Mk, H, K, Kv below are num_batches,
 * num_queries, num_keys, num_heads, head_dim, head_dim_value.
 *
 * Variable length: with cu_seqlens_q and cu_seqlens_k (B + 1 prefix sums,
 * beginning with 0) the rows of all sequences follow each other, so that query
 * is [1, cu_seqlens_q[B], H, K] and so on; num_queries and num_keys are then
 * the greatest lengths, logsumexp is [B, H, Mq] all the same, and batch strides
 * of the other tensors are not read. */
typedef struct fa2_mem_efficient_backward_params {
  size_t struct_size;

  /* Inputs, of `dtype` but for logsumexp. */

  /* [B, Mq, H, K]. */
  const void* query;
  /* [B, Mk, H, K]. */
  const void* key;
  /* [B, Mk, H, Kv]. */
  const void* value;
  /* [B, H, Mq, Mk], added after the scale; or NULL. */
  const void* bias;
  /* [B, H, Mq], rows contiguous: natural log. */
  const float* logsumexp;
  /* [B, Mq, H, Kv]. */
  const void* output;
  /* [B, Mq, H, Kv]. */
  const void* grad_output;
  /* [B + 1], both or NULL. */
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;

  /* Outputs, of `dtype`, overwritten. They may interleave in one buffer, as
   * packed QKV gradients do (row stride 3 * H * K), but not overlap. */

  /* [B, Mq, H, K]. */
  void* grad_query;
  /* [B, Mk, H, K]; 0 for a key that no query sees. */
  void* grad_key;
  /* [B, Mk, H, Kv]. */
  void* grad_value;
  /* [B, H, Mq, Mk], every element written; or NULL. */
  void* grad_bias;

  /* FA2_F32, FA2_F16 or FA2_BF16. */
  int32_t dtype;
  float scale;
  int32_t num_batches;
  int32_t num_queries;
  int32_t num_keys;
  int32_t num_heads;
  /* Of query and key: up to 65,536. */
  int32_t head_dim;
  /* Of value and output: up to 65,536. */
  int32_t head_dim_value;
  /* FA2_MEM_EFFICIENT_... */
  int32_t custom_mask_type;
  /* w > 0: a query sees at most the w keys that end at its diagonal; needs a
   * causal mask type. */
  int32_t window_size;
  /* 1 to ceil(num_keys / 64). fa2 splits the keys by its own plan, so that the
   * value changes no result. */
  int32_t num_splits_key;
  /* In [0, 1]. */
  float dropout_prob;
  /* Philox key, and output number of element (0,0,0,0): see dropout_p in
   * fa2/attention.h. */
  uint64_t rng_seed;
  uint64_t rng_offset;

  int64_t q_strides[3];
  int64_t k_strides[3];
  int64_t v_strides[3];
  int64_t o_strides[3];
  int64_t gO_strides[3];
  /* (batch, head, query row); 0 broadcasts. */
  int64_t bias_strides[3];
  /* (batch, head). */
  int64_t lse_strides[2];
  int64_t gQ_strides[3];
  int64_t gK_strides[3];
  int64_t gV_strides[3];
  /* (batch, head, query row). */
  int64_t gB_strides[3];
} fa2_mem_efficient_backward_params;

/* Refuses, with a sentence: null pointers and pointers off their element's
 * boundary, a dtype other than those three, bias with cu_seqlens, grad_bias
 * without bias, one cu_seqlens without the other or not prefix sums, an unknown
 * mask type, dropout outside [0, 1], any extent <= 0, a head_dim over 65,536, a
 * window without a causal mask type, num_splits_key outside its range, and what
 * AttentionBackward refuses. */
FA2_EXPORT fa2_status fa2_mem_efficient_attention_backward(
    const fa2_mem_efficient_backward_params* params, fa2_context* context);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FA2_COMPAT_MEM_EFFICIENT_ATTENTION_H_ */
