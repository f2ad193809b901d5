// SPDX-License-Identifier: Apache-2.0

/* mlx-native's flash_attn_train_bwd (flash-attention backward in Metal for bf16
 * training), its delta pre-pass and its rounding kernel, called with the
 * buffers and parameter blocks of those kernels.
 *
 * All buffers are host memory. Errors and messages are those of fa2_c.h.
 */
#ifndef FA2_COMPAT_METAL_ATTENTION_H_
#define FA2_COMPAT_METAL_ATTENTION_H_

#include "fa2/fa2_c.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The kernel's parameter block, 160 bytes. Strides are in elements for (batch,
 * head, row); the last dimension is contiguous; dO uses O_strides. H counts
 * query heads, and query head h reads kv head h / gqa_factor. */
typedef struct fa2_metal_attention_params {
  int32_t B;
  int32_t H;
  int32_t D;
  int32_t qL;
  int32_t kL;
  int32_t gqa_factor;
  float scale;
  /* 0 or 1: none; the kernel knows no other. */
  float softcapping;
  /* Tile counts of a 32 x 16 tiling, which fa2 does not need: not read. */
  int32_t NQ;
  int32_t NK;
  int32_t NQ_aligned;
  int32_t NK_aligned;
  int32_t qL_rem;
  int32_t kL_rem;
  /* Not read: the causal mask counts from the top left. */
  int32_t qL_off;
  int32_t pad;
  int64_t Q_strides[3];
  int64_t K_strides[3];
  int64_t V_strides[3];
  int64_t O_strides[3];
} fa2_metal_attention_params;

/* Strides in elements for (batch, head, query row); 0 broadcasts. */
typedef struct fa2_metal_attention_mask_params {
  int64_t M_strides[3];
} fa2_metal_attention_mask_params;

/* The kernel's function constants. */
enum {
  /* qL is a multiple of 32. */
  FA2_METAL_ALIGN_Q = 1,
  /* kL is a multiple of 16. */
  FA2_METAL_ALIGN_K = 2,
  /* mask and mask_params are read. */
  FA2_METAL_HAS_MASK = 4,
  /* Query i sees key j iff j <= i. */
  FA2_METAL_DO_CAUSAL = 8
};

/* Q [B,H,qL,D], K and V [B,H/gqa_factor,kL,D], dO [B,H,qL,D]: bf16, by strides.
 * L [B,H,qL]: f32, dense, the natural-log logsumexp of the scaled, masked
 * scores. Dvec [B,H,qL]: f32, dense, rowsum(O * dO). mask [B,H,qL,kL]: bf16, by
 * strides, last dimension contiguous; -inf hides, anything else is added to the
 * scaled score. dQ [B,H,qL,D], dK and dV [B,H/gqa_factor,kL,D]: f32, dense; dQ
 * is overwritten, dK and dV are added to. */
FA2_EXPORT fa2_status fa2_metal_attention_backward(
    const void* Q, const void* K, const void* V, const void* dO, const float* L,
    const float* Dvec, const void* mask, float* dQ, float* dK, float* dV,
    const fa2_metal_attention_params* params,
    const fa2_metal_attention_mask_params* mask_params, uint32_t flags,
    fa2_context* context);

/* The parameter block of the delta pre-pass, 16 bytes. */
typedef struct fa2_metal_delta_params {
  uint32_t batch;
  uint32_t n_q_heads;
  uint32_t q_seq_len;
  uint32_t head_dim;
} fa2_metal_delta_params;

/* Dvec[b,h,i] = sum_d O[b,h,i,d] * dO[b,h,i,d]: O and dO bf16, dense
 * [B,H,qL,D]; Dvec f32, dense [B,H,qL], overwritten. */
FA2_EXPORT fa2_status fa2_metal_attention_delta(
    const void* O, const void* dO, float* Dvec,
    const fa2_metal_delta_params* params, fa2_context* context);

/* output[i] = input[i] rounded to bf16, to nearest even; a NaN becomes a quiet
 * NaN that keeps its sign and upper payload. The arrays must not overlap. */
FA2_EXPORT fa2_status fa2_metal_round_f32_to_bf16(const float* input,
                                                  void* output, uint64_t count,
                                                  fa2_context* context);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FA2_COMPAT_METAL_ATTENTION_H_ */
