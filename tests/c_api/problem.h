// SPDX-License-Identifier: Apache-2.0

/* One small attention problem with all its arrays, f32 and dense. */
#ifndef FA2_TESTS_C_API_PROBLEM_H_
#define FA2_TESTS_C_API_PROBLEM_H_

#include "check.h"

enum {
  kB = 2,
  kHq = 4,
  kHkv = 2,
  kNq = 37,
  kNk = 53,
  kD = 19,
  kQ = kB * kHq * kNq * kD,
  kKv = kB * kHkv * kNk * kD,
  kRows = kB * kHq * kNq
};

typedef struct Problem {
  float q[kQ], k[kKv], v[kKv], dout[kQ];
  float out[kQ], lse[kRows], delta[kRows];
  float dq[kQ], dk[kKv], dv[kKv];
  fa2_attention_options options;
  fa2_attention_forward_args forward;
  fa2_attention_backward_args backward;
} Problem;

static void fill(float* array, size_t count, uint32_t* state) {
  for (size_t i = 0; i < count; ++i) {
    *state = *state * 1664525u + 1013904223u;
    array[i] = (float)(*state >> 8) / 8388608.0f - 1.0f;
  }
}

/* Inputs from a seed, results all -1, causal from the bottom right. The caller
 * frees it. */
static Problem* make_problem(uint32_t seed) {
  Problem* p = calloc(1, sizeof *p);
  if (p == NULL) abort();
  fill(p->q, kQ, &seed);
  fill(p->k, kKv, &seed);
  fill(p->v, kKv, &seed);
  fill(p->dout, kQ, &seed);
  for (int i = 0; i < kQ; ++i) p->out[i] = p->dq[i] = -1.0f;
  for (int i = 0; i < kKv; ++i) p->dk[i] = p->dv[i] = -1.0f;
  for (int i = 0; i < kRows; ++i) p->lse[i] = p->delta[i] = -1.0f;
  p->options.struct_size = sizeof p->options;
  p->options.causal = FA2_CAUSAL_BOTTOM_RIGHT;

  p->forward.struct_size = sizeof p->forward;
  p->forward.options = &p->options;
  p->forward.q = fa2_dense_const(p->q, FA2_F32, kB, kHq, kNq, kD);
  p->forward.k = fa2_dense_const(p->k, FA2_F32, kB, kHkv, kNk, kD);
  p->forward.v = fa2_dense_const(p->v, FA2_F32, kB, kHkv, kNk, kD);
  p->forward.out = fa2_dense(p->out, FA2_F32, kB, kHq, kNq, kD);
  p->forward.lse = fa2_dense_rows(p->lse, FA2_F32, kB, kHq, kNq);

  p->backward.struct_size = sizeof p->backward;
  p->backward.options = &p->options;
  p->backward.dout = fa2_dense_const(p->dout, FA2_F32, kB, kHq, kNq, kD);
  p->backward.q = p->forward.q;
  p->backward.k = p->forward.k;
  p->backward.v = p->forward.v;
  p->backward.out = fa2_dense_const(p->out, FA2_F32, kB, kHq, kNq, kD);
  p->backward.lse = fa2_dense_const(p->lse, FA2_F32, kB, kHq, kNq, 1);
  p->backward.dq = fa2_dense(p->dq, FA2_F32, kB, kHq, kNq, kD);
  p->backward.dk = fa2_dense(p->dk, FA2_F32, kB, kHkv, kNk, kD);
  p->backward.dv = fa2_dense(p->dv, FA2_F32, kB, kHkv, kNk, kD);
  return p;
}

/* Whether a result is as make_problem left it. */
static int untouched(const float* array, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (array[i] != -1.0f) return 0;
  return 1;
}

static int nothing_written(const Problem* p) {
  return untouched(p->out, kQ) && untouched(p->lse, kRows) &&
         untouched(p->dq, kQ) && untouched(p->dk, kKv) && untouched(p->dv, kKv);
}

static double relative_l2(const float* actual, const float* expected,
                          size_t count) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < count; ++i) {
    const double d = (double)actual[i] - expected[i];
    difference += d * d;
    norm += (double)expected[i] * expected[i];
  }
  return sqrt(difference / norm);
}

#endif /* FA2_TESTS_C_API_PROBLEM_H_ */
