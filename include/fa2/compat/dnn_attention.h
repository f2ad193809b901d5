// SPDX-License-Identifier: Apache-2.0

/* flash_attention_backward of oxicuda-dnn, a cuDNN-like library: tensors with
 * shapes of their own and a config, checked against each other.
 *
 * All data is host memory. Errors and messages are those of fa2_c.h.
 */
#ifndef FA2_COMPAT_DNN_ATTENTION_H_
#define FA2_COMPAT_DNN_ATTENTION_H_

#include "fa2/fa2_c.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor of any rank; only read where it is an input. */
typedef struct fa2_dnn_tensor {
  void* data;
  /* FA2_F16, FA2_BF16, FA2_F32 or FA2_F64. */
  int32_t dtype;
  int32_t rank;
  /* `rank` sizes. */
  const int64_t* dims;
  /* In elements; NULL: dense. */
  const int64_t* strides;
} fa2_dnn_tensor;

typedef struct fa2_dnn_flash_attention_config {
  uint32_t head_dim;
  uint32_t seq_len_q;
  uint32_t seq_len_kv;
  /* Tile sizes of the GPU kernel: not read. */
  uint32_t block_m;
  uint32_t block_n;
  /* Not 0: query i sees key j iff j <= i. */
  uint32_t causal;
  /* Finite: what q k^T is multiplied with. */
  float sm_scale;
} fa2_dnn_flash_attention_config;

/* q, output, d_output, d_q [B, Hq, seq_len_q, head_dim]; k, v, d_k, d_v
 * [B, Hkv, seq_len_kv, head_dim], Hq a multiple of Hkv; all of one dtype.
 * logsumexp [B, Hq, seq_len_q, 1] or [B, Hq, seq_len_q]: f32 (f64 for f64),
 * natural log. The gradients are overwritten.
 *
 * Refuses, with a sentence that names the tensors and both shapes: a tensor
 * that is not 4-D (logsumexp: 3-D or 4-D); dims of q, d_q, output and d_output
 * that differ; of k and d_k; of v and d_v; a head_dim or a sequence length that
 * is not the config's; and what AttentionBackward refuses. */
FA2_EXPORT fa2_status fa2_dnn_flash_attention_backward(
    const fa2_dnn_flash_attention_config* config, const fa2_dnn_tensor* q,
    const fa2_dnn_tensor* k, const fa2_dnn_tensor* v,
    const fa2_dnn_tensor* output, const fa2_dnn_tensor* d_output,
    const fa2_dnn_tensor* logsumexp, const fa2_dnn_tensor* d_q,
    const fa2_dnn_tensor* d_k, const fa2_dnn_tensor* d_v, fa2_context* context);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FA2_COMPAT_DNN_ATTENTION_H_ */
