// SPDX-License-Identifier: Apache-2.0

/* fa2/compat/causal_attention.h from C: each argument arrives. */
#include "fa2/compat/causal_attention.h"

#include "check.h"

/* Against attention with its own forward, by the same formulas. */
static void test_causal_attention(void) {
  enum { kSeq = 21, kHeads = 4, kKvHeads = 2, kDim = 8 };
  enum { kQ = kSeq * kHeads * kDim, kKv = kSeq * kKvHeads * kDim };
  static float q[kQ], k[kKv], v[kKv], dout[kQ], out[kQ], lse[kSeq * kHeads];
  static float dq[kQ], dk[kKv], dv[kKv], dq_expected[kQ], dk_expected[kKv],
      dv_expected[kKv];
  fa2_attention_options options = {0};
  fa2_attention_forward_args forward = {0};
  fa2_attention_backward_args backward = {0};
  fa2_causal_attention_backward_args args = {0};
  uint32_t state = 1;
  float* const arrays[4] = {q, dout, k, v};
  for (int a = 0; a < 4; ++a) {
    for (int i = 0; i < (a < 2 ? kQ : kKv); ++i) {
      state = state * 1664525u + 1013904223u;
      arrays[a][i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    }
  }
  for (int i = 0; i < kKv; ++i) dk[i] = dv[i] = 1.0f;
  for (int i = 0; i < kQ; ++i) dq[i] = NAN;
  args.struct_size = sizeof args;
  args.num_heads = kHeads;
  args.num_kv_heads = kKvHeads;
  args.dout = fa2_dense_const(dout, FA2_F32, 1, 1, kSeq, kHeads * kDim);
  args.q = fa2_dense_const(q, FA2_F32, 1, 1, kSeq, kHeads * kDim);
  args.k = fa2_dense_const(k, FA2_F32, 1, 1, kSeq, kKvHeads * kDim);
  args.v = fa2_dense_const(v, FA2_F32, 1, 1, kSeq, kKvHeads * kDim);
  args.dq = fa2_dense(dq, FA2_F32, 1, 1, kSeq, kHeads * kDim);
  args.dk = fa2_dense(dk, FA2_F32, 1, 1, kSeq, kKvHeads * kDim);
  args.dv = fa2_dense(dv, FA2_F32, 1, 1, kSeq, kKvHeads * kDim);
  args.accumulate_dk = 1;
  CHECK_OK(fa2_causal_attention_backward(&args, NULL));

  /* [1, H, seq, D] views of [seq, H * D] arrays. */
  options.struct_size = sizeof options;
  options.causal = FA2_CAUSAL_TOP_LEFT;
  forward.struct_size = sizeof forward;
  forward.options = &options;
  forward.q = fa2_dense_const(q, FA2_F32, 1, kHeads, kSeq, kDim);
  forward.q.strides[1] = kDim;
  forward.q.strides[2] = kHeads * kDim;
  forward.k = fa2_dense_const(k, FA2_F32, 1, kKvHeads, kSeq, kDim);
  forward.k.strides[1] = kDim;
  forward.k.strides[2] = kKvHeads * kDim;
  forward.v = forward.k;
  forward.v.data = v;
  forward.out = fa2_dense(out, FA2_F32, 1, kHeads, kSeq, kDim);
  forward.lse = fa2_dense_rows(lse, FA2_F32, 1, kHeads, kSeq);
  CHECK_OK(fa2_attention_reference_forward(&forward));
  backward.struct_size = sizeof backward;
  backward.options = &options;
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.dout = forward.q;
  backward.dout.data = dout;
  backward.out = fa2_dense_const(out, FA2_F32, 1, kHeads, kSeq, kDim);
  backward.lse = fa2_dense_rows_const(lse, FA2_F32, 1, kHeads, kSeq);
  backward.dq = fa2_dense(dq_expected, FA2_F32, 1, kHeads, kSeq, kDim);
  backward.dk = fa2_dense(dk_expected, FA2_F32, 1, kKvHeads, kSeq, kDim);
  backward.dv = fa2_dense(dv_expected, FA2_F32, 1, kKvHeads, kSeq, kDim);
  memcpy(backward.dq.strides, forward.q.strides, sizeof backward.dq.strides);
  memcpy(backward.dk.strides, forward.k.strides, sizeof backward.dk.strides);
  memcpy(backward.dv.strides, forward.k.strides, sizeof backward.dv.strides);
  CHECK_OK(fa2_attention_reference_backward(&backward));
  for (int i = 0; i < kQ; ++i) CHECK(fabs(dq[i] - dq_expected[i]) <= 1e-5);
  for (int i = 0; i < kKv; ++i) {
    CHECK(fabs(dk[i] - dk_expected[i] - 1.0f) <= 1e-5);
    CHECK(fabs(dv[i] - dv_expected[i]) <= 1e-5);
  }
  args.precision = 5;
  CHECK_FAILS(fa2_causal_attention_backward(&args, NULL), FA2_INVALID_ARGUMENT,
              "precision is 5");
  args.precision = 0;
  args.num_kv_heads = 3;
  CHECK_FAILS(fa2_causal_attention_backward(&args, NULL), FA2_INVALID_ARGUMENT,
              "num_kv_heads");
}

int main(void) {
  test_causal_attention();
  if (g_failures != 0) fprintf(stderr, "%d checks failed\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}
