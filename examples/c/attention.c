// SPDX-License-Identifier: Apache-2.0

/* Attention forward and backward from C, checked against the float64 oracle.
 *
 * With find_package(fa2): target_link_libraries(... fa2::c). Otherwise:
 *   cc -std=c99 attention.c $(pkg-config --cflags --libs fa2) -lm -o attention
 */
#include <fa2/fa2_c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Batch, query heads, kv heads, sequence length, head dim. */
enum { B = 2, HQ = 4, HKV = 2, N = 200, D = 64 };

/* Reproducible numbers in (-1, 1). */
static float* random_array(size_t count) {
  static uint32_t state = 1;
  float* array = malloc(count * sizeof(float));
  if (array == NULL) exit(1);
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    array[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
  }
  return array;
}

static void check(fa2_status status, const char* what) {
  if (status == FA2_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, fa2_status_string(status),
          fa2_last_error());
  exit(1);
}

/* Relative L2 distance. */
static double distance(const float* actual, const float* expected,
                       size_t count) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < count; ++i) {
    const double d = (double)actual[i] - expected[i];
    difference += d * d;
    norm += (double)expected[i] * expected[i];
  }
  return sqrt(difference / norm);
}

int main(void) {
  const size_t q_count = (size_t)B * HQ * N * D;
  const size_t kv_count = (size_t)B * HKV * N * D;
  float *q = random_array(q_count), *dout = random_array(q_count);
  float *k = random_array(kv_count), *v = random_array(kv_count);
  float *out = random_array(q_count), *lse = random_array((size_t)B * HQ * N);
  float *dq = random_array(q_count), *dq_expected = random_array(q_count);
  float *dk = random_array(kv_count), *dk_expected = random_array(kv_count);
  float *dv = random_array(kv_count), *dv_expected = random_array(kv_count);

  printf("fa2 %s\n", fa2_version_string());
  fa2_context* context = NULL;
  check(fa2_context_create(NULL, &context), "fa2_context_create");
  fa2_context_info info = {0};
  info.struct_size = sizeof info;
  check(fa2_context_get_info(context, &info), "fa2_context_get_info");
  printf("%d threads, target %s\n", (int)info.num_threads, info.target);

  fa2_attention_options options = {0};
  options.struct_size = sizeof options;
  options.causal = FA2_CAUSAL_TOP_LEFT;

  fa2_attention_forward_args forward = {0};
  forward.struct_size = sizeof forward;
  forward.options = &options;
  forward.q = fa2_dense_const(q, FA2_F32, B, HQ, N, D);
  forward.k = fa2_dense_const(k, FA2_F32, B, HKV, N, D);
  forward.v = fa2_dense_const(v, FA2_F32, B, HKV, N, D);
  forward.out = fa2_dense(out, FA2_F32, B, HQ, N, D);
  forward.lse = fa2_dense_rows(lse, FA2_F32, B, HQ, N);
  check(fa2_attention_forward(&forward, context), "fa2_attention_forward");

  fa2_attention_backward_args backward = {0};
  backward.struct_size = sizeof backward;
  backward.options = &options;
  backward.dout = fa2_dense_const(dout, FA2_F32, B, HQ, N, D);
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.out = fa2_dense_const(out, FA2_F32, B, HQ, N, D);
  backward.lse = fa2_dense_rows_const(lse, FA2_F32, B, HQ, N);
  backward.dq = fa2_dense(dq, FA2_F32, B, HQ, N, D);
  backward.dk = fa2_dense(dk, FA2_F32, B, HKV, N, D);
  backward.dv = fa2_dense(dv, FA2_F32, B, HKV, N, D);
  size_t bytes = 0;
  check(fa2_attention_backward_workspace(&backward, &bytes, context),
        "fa2_attention_backward_workspace");
  printf("backward takes %zu bytes of workspace\n", bytes);
  check(fa2_attention_backward(&backward, context), "fa2_attention_backward");

  backward.dq.data = dq_expected;
  backward.dk.data = dk_expected;
  backward.dv.data = dv_expected;
  check(fa2_attention_reference_backward(&backward),
        "fa2_attention_reference_backward");
  const double errors[3] = {distance(dq, dq_expected, q_count),
                            distance(dk, dk_expected, kv_count),
                            distance(dv, dv_expected, kv_count)};
  printf("relative L2 error of dq %.2g, dk %.2g, dv %.2g\n", errors[0],
         errors[1], errors[2]);

  fa2_context_destroy(context);
  float* arrays[] = {q,  k,  v,  out,         lse,         dout,
                     dq, dk, dv, dq_expected, dk_expected, dv_expected};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; ++i) free(arrays[i]);
  /* 3e-6: what fa2 promises for f32. */
  return errors[0] <= 3e-6 && errors[1] <= 3e-6 && errors[2] <= 3e-6 ? 0 : 1;
}
