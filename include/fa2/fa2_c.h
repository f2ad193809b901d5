// SPDX-License-Identifier: Apache-2.0

/* The C interface of fa2: every function of the C++ interface, in C99. The
 * headers of fa2/compat/ add entry points with the parameters of other kernels.
 *
 * Status and message. Every function that can fail returns a fa2_status; on
 * anything but FA2_OK nothing has been written, and fa2_last_error() gives one
 * sentence that names the argument, what it is and what it must be. Nothing
 * throws, aborts or prints.
 *
 * Structs. A struct that may grow begins with `struct_size`, which the caller
 * sets to sizeof(the struct). Zero means "the default" in every other field,
 * now and in later versions, so
 *   fa2_attention_options options = {0};
 *   options.struct_size = sizeof options;
 * is complete. A library newer than its caller reads what the caller's struct
 * has; an older one accepts a larger struct whose tail is all zero and refuses
 * any other. fa2_tensor and fa2_const_tensor never change.
 *
 * Threads. Calls from several threads may share a context.
 */
#ifndef FA2_FA2_C_H_
#define FA2_FA2_C_H_

#include <stddef.h>
#include <stdint.h>

#include "fa2/export.h"
#include "fa2/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status, version ---------------------------------------------------- */

typedef enum fa2_status {
  FA2_OK = 0,
  /* The arguments do not fit each other or the function. */
  FA2_INVALID_ARGUMENT = 1,
  /* No memory to be had, or workspace is over the context's limit. */
  FA2_OUT_OF_MEMORY = 2,
  /* A combination, target or engine that this build or CPU lacks. */
  FA2_UNSUPPORTED = 3,
  /* A fault of fa2 itself. */
  FA2_INTERNAL = 4
} fa2_status;

/* The sentence of the last failed call on this thread; "" after one that
 * succeeded. Valid until this thread's next fa2 call; at most 1023 bytes. */
FA2_EXPORT const char* fa2_last_error(void);

/* "ok", "invalid argument", "out of memory", "unsupported", "internal error",
 * or "unknown status". */
FA2_EXPORT const char* fa2_status_string(fa2_status status);

/* "MAJOR.MINOR.PATCH" of the library; FA2_VERSION_STRING of fa2/version.h is
 * that of the headers. */
FA2_EXPORT const char* fa2_version_string(void);

/* MAJOR * 1000000 + MINOR * 1000 + PATCH. */
FA2_EXPORT uint32_t fa2_version(void);

/* ---- Tensors ------------------------------------------------------------ */

/* Element types. bf16 and f16 are 16-bit storage; a bool is one byte. */
enum {
  FA2_F32 = 0,
  FA2_BF16 = 1,
  FA2_F16 = 2,
  FA2_F64 = 3,
  FA2_BOOL = 4,
  FA2_I32 = 5,
  FA2_I64 = 6,
  /* Eight bits of a mask. */
  FA2_U8 = 7
};

/* A read-only strided array of at most four dimensions. `strides` count
 * elements and may be negative or 0; `data` points to element (0,0,0,0), NULL
 * means "not given". Matrices and vectors carry leading sizes of 1; row
 * statistics [B, H, N] (lse, dlse, delta) a last size of 1, which
 * fa2_dense_rows fills in. */
typedef struct fa2_const_tensor {
  const void* data;
  /* FA2_F32 to FA2_U8. */
  int32_t dtype;
  /* 0. */
  int32_t reserved;
  int64_t sizes[4];
  int64_t strides[4];
} fa2_const_tensor;

/* The same for arrays that a call writes. */
typedef struct fa2_tensor {
  void* data;
  int32_t dtype;
  /* 0. */
  int32_t reserved;
  int64_t sizes[4];
  int64_t strides[4];
} fa2_tensor;

/* Dense views: the last dimension is contiguous. For q: B, Hq, Nq, D. */
FA2_EXPORT fa2_const_tensor fa2_dense_const(const void* data, int32_t dtype,
                                            int64_t b, int64_t h, int64_t n,
                                            int64_t d);
FA2_EXPORT fa2_tensor fa2_dense(void* data, int32_t dtype, int64_t b, int64_t h,
                                int64_t n, int64_t d);

/* Dense row statistics: B, Hq, Nq for lse, dlse and delta; with packed
 * sequences 1, Hq, total_q, or padded: sequences, Hq, longest. For other
 * strides, set strides[0..2] of the result. */
FA2_EXPORT fa2_const_tensor fa2_dense_rows_const(const void* data,
                                                 int32_t dtype, int64_t b,
                                                 int64_t h, int64_t n);
FA2_EXPORT fa2_tensor fa2_dense_rows(void* data, int32_t dtype, int64_t b,
                                     int64_t h, int64_t n);

/* ---- Contexts ----------------------------------------------------------- */

/* Threads, workspace memory and the choice of kernels. NULL in the place of a
 * context is the process's default one, made from the environment on first
 * use. After fork() the child may go on using a context. */
typedef struct fa2_context fa2_context;

typedef struct fa2_context_options {
  size_t struct_size;
  /* 0: FA2_NUM_THREADS, or all cores of this process. */
  int32_t num_threads;
  /* 0. */
  int32_t reserved;
  /* Bytes of workspace held at once; 0: no limit. */
  size_t memory_limit;
  /* Where workspace comes from: all of it out of one buffer of the caller's,
   * which must outlive the context (two calls at once need twice the bytes);
   * or a pair of functions; or, with neither, the system. `allocate` returns
   * memory aligned to `alignment` or NULL. */
  void* workspace;
  size_t workspace_bytes;
  void* (*allocate)(void* opaque, size_t bytes, size_t alignment);
  void (*release)(void* opaque, void* memory, size_t bytes);
  void* opaque;
  /* Highway's name in lower case ("avx2"); NULL or "": FA2_MAX_TARGET, or the
   * best. */
  const char* max_target;
  /* "f32", "bf16dot", "amx"; NULL or "": FA2_ENGINE, or the fastest for each
   * call. */
  const char* engine;
  /* Whose threads calls run on: "tbb" (oneTBB's), "openmp" (those of the OpenMP
   * runtime that the process has loaded); NULL or "": FA2_POOL, or "tbb". */
  const char* pool;
  /* Instead of `pool`, the caller's own: calls worker(argument, i) for i from 0
   * to workers - 1, each on a thread of its own as far as there are threads,
   * and returns when these calls have. Those for which there is no thread may
   * come one after another, or never. A worker may wait for another one that
   * has begun, so threads must not keep each other from running. */
  void (*run_workers)(void* pool_opaque, int32_t workers,
                      void (*worker)(void* argument, int32_t index),
                      void* argument);
  void* pool_opaque;
} fa2_context_options;

/* `options` may be NULL. */
FA2_EXPORT fa2_status fa2_context_create(const fa2_context_options* options,
                                         fa2_context** context);

/* No call may be using the context. NULL is allowed. */
FA2_EXPORT void fa2_context_destroy(fa2_context* context);

typedef struct fa2_context_info {
  size_t struct_size;
  int32_t num_threads;
  int32_t reserved;
  /* The instruction set in use, e.g. "avx3". */
  char target[32];
  /* Engine for bf16 inputs in precision fast. */
  char engine[32];
  /* Every target that this build and CPU have, best first, separated by
   * spaces. */
  char targets[256];
  /* Every engine that this build and CPU have. */
  char engines[128];
  /* Bytes held now, in use or kept for reuse. */
  size_t workspace_bytes;
  /* The highest number so far. */
  size_t peak_workspace_bytes;
  /* How often memory was asked for. */
  size_t allocation_count;
  /* "tbb", "openmp" or "caller". */
  char pool[16];
} fa2_context_info;

/* The caller sets info->struct_size; the rest is written. */
FA2_EXPORT fa2_status fa2_context_get_info(fa2_context* context,
                                           fa2_context_info* info);

/* Gives workspace that no call is using back to where it came from. */
FA2_EXPORT fa2_status fa2_context_release_workspace(fa2_context* context);

/* ---- Attention ---------------------------------------------------------- */

enum {
  FA2_CAUSAL_NONE = 0,
  /* Query i sees key j iff j <= i. */
  FA2_CAUSAL_TOP_LEFT = 1,
  /* Query i sees key j iff j <= i + Nk - Nq. */
  FA2_CAUSAL_BOTTOM_RIGHT = 2
};

enum {
  /* bf16 inputs: products in bf16, f32 sums. */
  FA2_PRECISION_FAST = 0,
  /* f32 inputs may use three products of bf16 terms. */
  FA2_PRECISION_HIGH = 1,
  /* P and dS stay f32. */
  FA2_PRECISION_EXACT = 2
};

/* Which blocks of queries x keys are visible: fa2/block_mask.h says what the
 * tensors are. Hidden blocks cost nothing. */
typedef struct fa2_block_mask {
  size_t struct_size;
  /* Multiples of 16; 0: 128. */
  int64_t block_q;
  int64_t block_k;
  /* i32 [B or 1, Hq or 1, rows] (fa2_dense_rows_const) and [.., .., rows,
   * columns or fewer]: the partial blocks of each row of blocks. */
  fa2_const_tensor kv_num_blocks;
  fa2_const_tensor kv_indices;
  /* The same of the full blocks; both or neither. */
  fa2_const_tensor full_kv_num_blocks;
  fa2_const_tensor full_kv_indices;
  /* u8 [1, 1, partial blocks, block_q * block_k / 8]; not given: all of a
   * partial block is visible. */
  fa2_const_tensor bits;
} fa2_block_mask;

/* What shapes the scores S = scale * Q K^T; then, in this order: softcap *
 * tanh(S / softcap), + bias, + ALiBi, mask. fa2/attention.h gives the shapes
 * and dtypes of the tensors, which are the same here. */
typedef struct fa2_attention_options {
  size_t struct_size;
  /* 0: the scale is 1 / sqrt(D). */
  int32_t has_scale;
  /* FA2_CAUSAL_... */
  int32_t causal;
  /* Finite; read where has_scale is not 0. */
  double scale;
  /* 0: no window, window_left and window_right are not read. */
  int32_t has_window;
  /* FA2_PRECISION_... */
  int32_t precision;
  /* Keys in [i' - window_left, i' + window_right] are visible to query i,
   * where i' = i with FA2_CAUSAL_TOP_LEFT and i + Nk - Nq otherwise; -1 is
   * unbounded. */
  int64_t window_left;
  int64_t window_right;
  /* 0: none; else finite and > 0. */
  double softcap;
  /* [B or 1, Hq or 1, Nq or 1, Nk or 1]: additive (f32, bf16, f16, f64), or a
   * boolean mask. */
  fa2_const_tensor bias;
  /* f32 [B or 1, Hq, 1, 1]. */
  fa2_const_tensor alibi_slopes;
  /* f32 [1, Hq, 1, 1]. */
  fa2_const_tensor sinks;
  /* In [0, 1]; fa2/attention.h says which element is kept. */
  double dropout_p;
  uint64_t philox_seed;
  uint64_t philox_offset;
  /* Prefix sums of lengths, i32 or i64 [1, 1, 1, sequences + 1]. */
  fa2_const_tensor cu_seqlens_q;
  fa2_const_tensor cu_seqlens_k;
  /* 0: the longest sequence. */
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  /* NULL: all blocks are visible. */
  const fa2_block_mask* block_mask;
} fa2_attention_options;

typedef struct fa2_attention_forward_args {
  size_t struct_size;
  /* NULL: all defaults. */
  const fa2_attention_options* options;
  /* [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, Dv]. */
  fa2_const_tensor q, k, v;
  /* [B, Hq, Nq, Dv]. */
  fa2_tensor out;
  /* [B, Hq, Nq]. May be left out. */
  fa2_tensor lse;
} fa2_attention_forward_args;

typedef struct fa2_attention_backward_args {
  size_t struct_size;
  /* NULL: all defaults. */
  const fa2_attention_options* options;
  fa2_const_tensor dout, q, k, v;
  /* May be left out, and is not looked at, when delta is given. */
  fa2_const_tensor out;
  /* Of the forward, [B, Hq, Nq]. */
  fa2_const_tensor lse;
  /* Gradient of lse, [B, Hq, Nq]. May be left out. */
  fa2_const_tensor dlse;
  /* rowsum(out * dout), [B, Hq, Nq]. May be left out. */
  fa2_const_tensor delta;
  /* Each gradient may be left out. */
  fa2_tensor dq, dk, dv, dbias, dalibi_slopes, dsinks;
  /* Not 0: the gradient is added to what the output holds. */
  int32_t accumulate_dq, accumulate_dk, accumulate_dv, accumulate_dbias;
} fa2_attention_backward_args;

FA2_EXPORT fa2_status fa2_attention_forward(
    const fa2_attention_forward_args* args, fa2_context* context);
FA2_EXPORT fa2_status fa2_attention_backward(
    const fa2_attention_backward_args* args, fa2_context* context);

/* Bytes of workspace that the call would take from the context. */
FA2_EXPORT fa2_status
fa2_attention_forward_workspace(const fa2_attention_forward_args* args,
                                size_t* bytes, fa2_context* context);
FA2_EXPORT fa2_status
fa2_attention_backward_workspace(const fa2_attention_backward_args* args,
                                 size_t* bytes, fa2_context* context);

/* delta[b,h,i] = sum_d out[b,h,i,d] * dout[b,h,i,d]: out and dout [B, H, N, D]
 * of one dtype, delta [B, H, N] f32 (f64 for f64), overwritten. */
FA2_EXPORT fa2_status fa2_attention_delta(const fa2_const_tensor* out,
                                          const fa2_const_tensor* dout,
                                          const fa2_tensor* delta,
                                          fa2_context* context);

/* The dropout mask that attention uses: keep[b,h,i,j], FA2_BOOL, dense
 * [B, Hq, Nq, Nk]. */
FA2_EXPORT fa2_status fa2_philox_keep_mask(double dropout_p, uint64_t seed,
                                           uint64_t offset,
                                           const fa2_tensor* keep,
                                           fa2_context* context);

/* The float64 oracle: the same arguments, plain loops in double, every output
 * in any float dtype. Slow, on one thread; row by row, so that no O(Nq * Nk)
 * matrix is ever held. */
FA2_EXPORT fa2_status
fa2_attention_reference_forward(const fa2_attention_forward_args* args);
FA2_EXPORT fa2_status
fa2_attention_reference_backward(const fa2_attention_backward_args* args);

/* ---- The other kernels of a training step -------------------------------- */

/* Arrays of rows are [.., .., rows, dim] with contiguous rows, vectors [1, 1,
 * 1, n]; f32, bf16, f16 or f64 where nothing else is said.
 * fa2/training_ops.h has the formulas, and which strides and dtypes each tensor
 * may have. */

/* out[.., .., c, r] = in[.., .., r, c]. */
FA2_EXPORT fa2_status fa2_transpose_2d(const fa2_const_tensor* in,
                                       const fa2_tensor* out,
                                       fa2_context* context);

/* By rows; y is the result of the softmax. */
FA2_EXPORT fa2_status fa2_softmax(const fa2_const_tensor* x,
                                  const fa2_tensor* y, fa2_context* context);
FA2_EXPORT fa2_status fa2_softmax_backward(const fa2_const_tensor* dy,
                                           const fa2_const_tensor* y,
                                           const fa2_tensor* dx,
                                           fa2_context* context);

/* y = x * weight / sqrt(mean(x^2) + eps) by rows. */
FA2_EXPORT fa2_status fa2_rms_norm(const fa2_const_tensor* x,
                                   const fa2_const_tensor* weight, double eps,
                                   const fa2_tensor* y, fa2_context* context);

/* In the structs below outputs are overwritten. A sum over rows (dweight, loss)
 * has an accumulate_ field: not 0, the sum is added to what the output holds.
 * Outputs may be left out, but for that of the embedding's gradient. */
typedef struct fa2_rms_norm_backward_args {
  size_t struct_size;
  /* [.., .., rows, dim]. */
  fa2_const_tensor dy, x;
  /* [1, 1, 1, dim]. */
  fa2_const_tensor weight;
  /* Finite, >= 0. */
  double eps;
  /* [.., .., rows, dim]. */
  fa2_tensor dx;
  /* [1, 1, 1, dim]. */
  fa2_tensor dweight;
  int32_t accumulate_dweight;
  /* 0. */
  int32_t reserved;
} fa2_rms_norm_backward_args;
FA2_EXPORT fa2_status fa2_rms_norm_backward(
    const fa2_rms_norm_backward_args* args, fa2_context* context);

/* Rotary position embedding: pairs of the first 2 * cos.sizes[3] elements of a
 * row turn; the backward turns back. */
typedef struct fa2_rotary_embedding_args {
  size_t struct_size;
  /* [B, H, N, dim]. */
  fa2_const_tensor x;
  /* [1 or B, 1, N, R / 2], R <= dim. */
  fa2_const_tensor cos, sin;
  /* As x. */
  fa2_tensor y;
  /* 0: pairs (i, i + R / 2), else (2i, 2i + 1). */
  int32_t interleaved;
  /* 0. */
  int32_t reserved;
} fa2_rotary_embedding_args;
FA2_EXPORT fa2_status fa2_rotary_embedding(
    const fa2_rotary_embedding_args* args, fa2_context* context);

typedef struct fa2_rotary_embedding_backward_args {
  size_t struct_size;
  /* [B, H, N, dim]. */
  fa2_const_tensor dy;
  /* As in the forward. */
  fa2_const_tensor cos, sin;
  /* As dy. */
  fa2_tensor dx;
  int32_t interleaved;
  /* 0. */
  int32_t reserved;
} fa2_rotary_embedding_backward_args;
FA2_EXPORT fa2_status fa2_rotary_embedding_backward(
    const fa2_rotary_embedding_backward_args* args, fa2_context* context);

/* y = gate / (1 + exp(-gate)) * up. */
FA2_EXPORT fa2_status fa2_swiglu(const fa2_const_tensor* gate,
                                 const fa2_const_tensor* up,
                                 const fa2_tensor* y, fa2_context* context);

typedef struct fa2_swiglu_backward_args {
  size_t struct_size;
  /* [.., .., rows, dim]. */
  fa2_const_tensor dy, gate, up;
  /* As gate; each may be left out. */
  fa2_tensor dgate, dup;
} fa2_swiglu_backward_args;
FA2_EXPORT fa2_status fa2_swiglu_backward(const fa2_swiglu_backward_args* args,
                                          fa2_context* context);

/* Row r of dweight is the sum of dy[t] over all t with ids[t] = r. */
typedef struct fa2_embedding_backward_args {
  size_t struct_size;
  /* [.., .., tokens, dim]. */
  fa2_const_tensor dy;
  /* i32 or i64 [1, 1, 1, tokens], each in [0, num_embeddings). */
  fa2_const_tensor ids;
  /* [1, 1, num_embeddings, dim]. */
  fa2_tensor dweight;
  int32_t accumulate_dweight;
  /* 0. */
  int32_t reserved;
} fa2_embedding_backward_args;
FA2_EXPORT fa2_status fa2_embedding_backward(
    const fa2_embedding_backward_args* args, fa2_context* context);

/* Softmax cross entropy and its gradient, in one pass over the logits. */
typedef struct fa2_cross_entropy_args {
  size_t struct_size;
  /* [.., .., positions, vocab]. */
  fa2_const_tensor logits;
  /* i32 or i64 [1, 1, 1, positions]. */
  fa2_const_tensor targets;
  /* 0: positions with target -100 do not count. */
  int32_t has_ignore_index;
  /* 0: the sum is divided by the number of positions that count. */
  int32_t has_count;
  int64_t ignore_index;
  /* >= 0; 0: the call does nothing. */
  int64_t count;
  /* One element, f32 or f64. */
  fa2_tensor loss;
  /* As logits, and may be the logits. */
  fa2_tensor dlogits;
  int32_t accumulate_loss;
  /* 0. */
  int32_t reserved;
  /* In [0, 1]. */
  double label_smoothing;
  /* Finite, >= 0. */
  double z_loss;
  /* f32 or f64 [1, 1, 1, positions]. */
  fa2_const_tensor weights;
  /* f32 or f64 [1, 1, 1, positions]. */
  fa2_tensor losses;
  /* One element, f32 or f64; added to with accumulate_loss. */
  fa2_tensor z_loss_part;
} fa2_cross_entropy_args;
FA2_EXPORT fa2_status fa2_cross_entropy(const fa2_cross_entropy_args* args,
                                        fa2_context* context);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FA2_FA2_C_H_ */
