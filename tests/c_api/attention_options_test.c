// SPDX-License-Identifier: Apache-2.0

/* Every option and every optional array of attention arrives through the C
 * interface: each changes a result, as it changes the oracle's. */
#include "problem.h"

/* f32 and precision fast: what fa2 promises. */
static const double kBound = 3e-6;

enum { kBias = kHq * kNq * kNk };

/* Arrays that make_problem leaves out. */
typedef struct Extras {
  float bias[kBias], slopes[kHq], sinks[kHq], dlse[kRows];
  float dbias[kBias], dslopes[kHq], dsinks[kHq];
} Extras;

typedef void (*Change)(Problem* p, Extras* x);

static Extras* make_extras(uint32_t seed) {
  Extras* x = calloc(1, sizeof *x);
  if (x == NULL) abort();
  fill(x->bias, kBias, &seed);
  fill(x->sinks, kHq, &seed);
  fill(x->dlse, kRows, &seed);
  for (int h = 0; h < kHq; ++h) x->slopes[h] = 0.1f * (float)(h + 1);
  return x;
}

static void set_causal_none(Problem* p, Extras* x) {
  (void)x;
  p->options.causal = FA2_CAUSAL_NONE;
}

static void set_causal_top_left(Problem* p, Extras* x) {
  (void)x;
  p->options.causal = FA2_CAUSAL_TOP_LEFT;
}

static void set_scale(Problem* p, Extras* x) {
  (void)x;
  p->options.has_scale = 1;
  p->options.scale = 0.7;
}

static void set_window_left(Problem* p, Extras* x) {
  (void)x;
  p->options.has_window = 1;
  p->options.window_left = 5;
  p->options.window_right = -1;
}

static void set_window_right(Problem* p, Extras* x) {
  (void)x;
  p->options.causal = FA2_CAUSAL_NONE;
  p->options.has_window = 1;
  p->options.window_left = -1;
  p->options.window_right = 3;
}

static void set_softcap(Problem* p, Extras* x) {
  (void)x;
  p->options.softcap = 0.5;
}

static void set_bias(Problem* p, Extras* x) {
  p->options.bias = fa2_dense_const(x->bias, FA2_F32, 1, kHq, kNq, kNk);
  p->backward.dbias = fa2_dense(x->dbias, FA2_F32, 1, kHq, kNq, kNk);
}

/* Blocks of 16 x 16: partial ones, which show every other key, and full ones.
 */
static void set_block_mask(Problem* p, Extras* x) {
  static const int32_t counts[3] = {1, 0, 1}, full_counts[3] = {1, 2, 1};
  static const int32_t indices[6] = {1, -1, -1, -1, 3, -1};
  static const int32_t full_indices[6] = {0, -1, 0, 2, 1, -1};
  static uint8_t bits[2 * 32];
  static fa2_block_mask mask;
  (void)x;
  memset(bits, 0x55, sizeof bits);
  memset(&mask, 0, sizeof mask);
  mask.struct_size = sizeof mask;
  mask.block_q = 16;
  mask.block_k = 16;
  mask.kv_num_blocks = fa2_dense_rows_const(counts, FA2_I32, 1, 1, 3);
  mask.kv_indices = fa2_dense_const(indices, FA2_I32, 1, 1, 3, 2);
  mask.full_kv_num_blocks = fa2_dense_rows_const(full_counts, FA2_I32, 1, 1, 3);
  mask.full_kv_indices = fa2_dense_const(full_indices, FA2_I32, 1, 1, 3, 2);
  mask.bits = fa2_dense_const(bits, FA2_U8, 1, 1, 2, 32);
  p->options.block_mask = &mask;
}

static void set_alibi(Problem* p, Extras* x) {
  p->options.alibi_slopes = fa2_dense_const(x->slopes, FA2_F32, 1, kHq, 1, 1);
  p->backward.dalibi_slopes = fa2_dense(x->dslopes, FA2_F32, 1, kHq, 1, 1);
}

static void set_sinks(Problem* p, Extras* x) {
  p->options.sinks = fa2_dense_const(x->sinks, FA2_F32, 1, kHq, 1, 1);
  p->backward.dsinks = fa2_dense(x->dsinks, FA2_F32, 1, kHq, 1, 1);
}

static void set_dropout(Problem* p, Extras* x) {
  (void)x;
  p->options.dropout_p = 0.3;
}

static void set_dropout_seed(Problem* p, Extras* x) {
  set_dropout(p, x);
  p->options.philox_seed = 1248;
}

static void set_dropout_offset(Problem* p, Extras* x) {
  set_dropout(p, x);
  p->options.philox_offset = 41;
}

static void set_dlse(Problem* p, Extras* x) {
  p->backward.dlse = fa2_dense_rows_const(x->dlse, FA2_F32, kB, kHq, kNq);
}

/* A delta other than rowsum(out * dout) shows that it is read. */
static void set_delta(Problem* p, Extras* x) {
  p->backward.delta = fa2_dense_rows_const(x->dlse, FA2_F32, kB, kHq, kNq);
}

static void set_accumulate_dq(Problem* p, Extras* x) {
  (void)x;
  p->backward.accumulate_dq = 1;
}

static void set_accumulate_dk(Problem* p, Extras* x) {
  (void)x;
  p->backward.accumulate_dk = 1;
}

static void set_accumulate_dv(Problem* p, Extras* x) {
  (void)x;
  p->backward.accumulate_dv = 1;
}

static void set_accumulate_dbias(Problem* p, Extras* x) {
  set_bias(p, x);
  for (int i = 0; i < kBias; ++i) x->dbias[i] = 1.0f;
  p->backward.accumulate_dbias = 1;
}

static int same(const Problem* a, const Extras* x, const Problem* b,
                const Extras* y) {
  return memcmp(a->out, b->out, sizeof a->out) == 0 &&
         memcmp(a->dq, b->dq, sizeof a->dq) == 0 &&
         memcmp(a->dk, b->dk, sizeof a->dk) == 0 &&
         memcmp(a->dv, b->dv, sizeof a->dv) == 0 &&
         memcmp(x->dbias, y->dbias, sizeof x->dbias) == 0;
}

static void run(Change change, Problem* p, Extras* x) {
  if (change != NULL) change(p, x);
  CHECK_OK(fa2_attention_forward(&p->forward, NULL));
  CHECK_OK(fa2_attention_backward(&p->backward, NULL));
}

/* `change` gives other results than `base`, and they are the oracle's. */
static void check(const char* name, Change change, Change base) {
  const int failures = g_failures;
  Problem *plain = make_problem(1), *p = make_problem(1),
          *expected = make_problem(1);
  Extras *x_plain = make_extras(2), *x = make_extras(2),
         *x_expected = make_extras(2);
  run(base, plain, x_plain);
  run(change, p, x);
  change(expected, x_expected);
  CHECK_OK(fa2_attention_reference_forward(&expected->forward));
  CHECK_OK(fa2_attention_reference_backward(&expected->backward));
  CHECK(!same(p, x, plain, x_plain));
  CHECK(relative_l2(p->out, expected->out, kQ) <= kBound);
  CHECK(relative_l2(p->dq, expected->dq, kQ) <= kBound);
  CHECK(relative_l2(p->dk, expected->dk, kKv) <= kBound);
  CHECK(relative_l2(p->dv, expected->dv, kKv) <= kBound);
  if (p->backward.dbias.data != NULL)
    CHECK(relative_l2(x->dbias, x_expected->dbias, kBias) <= kBound);
  if (p->backward.dalibi_slopes.data != NULL) {
    CHECK(x->dslopes[0] != 0.0f);
    /* One number sums B * Nq * Nk signed terms. */
    CHECK(relative_l2(x->dslopes, x_expected->dslopes, kHq) <= 10 * kBound);
  }
  if (p->backward.dsinks.data != NULL) {
    CHECK(x->dsinks[0] != 0.0f);
    CHECK(relative_l2(x->dsinks, x_expected->dsinks, kHq) <= 10 * kBound);
  }
  if (g_failures != failures) fprintf(stderr, "  in %s\n", name);
  free(plain);
  free(p);
  free(expected);
  free(x_plain);
  free(x);
  free(x_expected);
}

/* The rows of both batch entries as two sequences of other lengths. */
static void test_packed_sequences(void) {
  enum { kSequences = 2 };
  const int32_t cu_q[kSequences + 1] = {0, 16, kNq};
  const int64_t cu_k[kSequences + 1] = {0, 33, kNk};
  Problem* results[2] = {make_problem(3), make_problem(3)};
  for (int r = 0; r < 2; ++r) {
    Problem* p = results[r];
    fa2_const_tensor* const inputs[] = {
        &p->forward.q,    &p->forward.k,     &p->forward.v,
        &p->backward.q,   &p->backward.k,    &p->backward.v,
        &p->backward.out, &p->backward.dout, &p->backward.lse};
    fa2_tensor* const outputs[] = {&p->forward.out, &p->forward.lse,
                                   &p->backward.dq, &p->backward.dk,
                                   &p->backward.dv};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; ++i)
      inputs[i]->sizes[0] = 1;
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; ++i)
      outputs[i]->sizes[0] = 1;
    p->options.cu_seqlens_q =
        fa2_dense_const(cu_q, FA2_I32, 1, 1, 1, kSequences + 1);
    p->options.cu_seqlens_k =
        fa2_dense_const(cu_k, FA2_I64, 1, 1, 1, kSequences + 1);
    p->options.dropout_p = 0.25; /* its mask depends on the greatest lengths */
    p->options.max_seqlen_q = 30;
    p->options.max_seqlen_k = 40;
    if (r == 0) {
      CHECK_OK(fa2_attention_forward(&p->forward, NULL));
      CHECK_OK(fa2_attention_backward(&p->backward, NULL));
    } else {
      CHECK_OK(fa2_attention_reference_forward(&p->forward));
      CHECK_OK(fa2_attention_reference_backward(&p->backward));
    }
  }
  CHECK(relative_l2(results[0]->out, results[1]->out, kQ / kB) <= kBound);
  CHECK(relative_l2(results[0]->dq, results[1]->dq, kQ / kB) <= kBound);
  CHECK(relative_l2(results[0]->dk, results[1]->dk, kKv / kB) <= kBound);
  CHECK(relative_l2(results[0]->dv, results[1]->dv, kKv / kB) <= kBound);
  /* The second batch entry's place is no longer theirs. */
  CHECK(untouched(results[0]->out + kQ / kB, kQ - kQ / kB));
  free(results[0]);
  free(results[1]);
}

/* One cu_seqlens without the other. */
static void test_refusal(void) {
  const int32_t cu[2] = {0, kNq};
  Problem* p = make_problem(4);
  p->options.cu_seqlens_q = fa2_dense_const(cu, FA2_I32, 1, 1, 1, 2);
  CHECK_FAILS(fa2_attention_forward(&p->forward, NULL), FA2_INVALID_ARGUMENT,
              "cu_seqlens");
  CHECK_FAILS(fa2_attention_backward(&p->backward, NULL), FA2_INVALID_ARGUMENT,
              "cu_seqlens");
  CHECK(nothing_written(p));
  free(p);
}

int main(void) {
  const struct {
    const char* name;
    Change change, base;
  } cases[] = {{"causal none", set_causal_none, NULL},
               {"causal top left", set_causal_top_left, NULL},
               {"scale", set_scale, NULL},
               {"window_left", set_window_left, NULL},
               {"window_right", set_window_right, set_causal_none},
               {"softcap", set_softcap, NULL},
               {"bias", set_bias, NULL},
               {"block_mask", set_block_mask, NULL},
               {"alibi_slopes", set_alibi, NULL},
               {"sinks", set_sinks, NULL},
               {"dropout_p", set_dropout, NULL},
               {"philox_seed", set_dropout_seed, set_dropout},
               {"philox_offset", set_dropout_offset, set_dropout},
               {"dlse", set_dlse, NULL},
               {"delta", set_delta, NULL},
               {"accumulate_dq", set_accumulate_dq, NULL},
               {"accumulate_dk", set_accumulate_dk, NULL},
               {"accumulate_dv", set_accumulate_dv, NULL},
               {"accumulate_dbias", set_accumulate_dbias, set_bias}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i)
    check(cases[i].name, cases[i].change, cases[i].base);
  test_packed_sequences();
  test_refusal();
  if (g_failures != 0) fprintf(stderr, "%d checks failed\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}
