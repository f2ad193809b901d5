// SPDX-License-Identifier: Apache-2.0

/* One head of one query and one key: softmax is 1, so out = v, dv = dout and
 * dq = dk = 0. Exits 0 if the installed library says so. */
#include <fa2/compat/dnn_attention.h>
#include <fa2/compat/mem_efficient_attention.h>
#include <fa2/compat/metal_attention.h>
#include <fa2/fa2_c.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char** argv) {
  const float q = 2.0f, k = 3.0f, v = 5.0f, dout = 7.0f;
  float out = -1.0f, lse = -1.0f, dq = -1.0f, dk = -1.0f, dv = -1.0f;
  fa2_attention_forward_args forward = {0};
  fa2_attention_backward_args backward = {0};
  if (argc != 2 || strcmp(argv[1], fa2_version_string()) != 0) {
    fprintf(stderr, "the library is version %s\n", fa2_version_string());
    return 1;
  }
  forward.struct_size = sizeof forward;
  forward.q = fa2_dense_const(&q, FA2_F32, 1, 1, 1, 1);
  forward.k = fa2_dense_const(&k, FA2_F32, 1, 1, 1, 1);
  forward.v = fa2_dense_const(&v, FA2_F32, 1, 1, 1, 1);
  forward.out = fa2_dense(&out, FA2_F32, 1, 1, 1, 1);
  forward.lse = fa2_dense(&lse, FA2_F32, 1, 1, 1, 1);
  if (fa2_attention_forward(&forward, NULL) != FA2_OK) {
    fprintf(stderr, "%s\n", fa2_last_error());
    return 1;
  }
  backward.struct_size = sizeof backward;
  backward.dout = fa2_dense_const(&dout, FA2_F32, 1, 1, 1, 1);
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.out = fa2_dense_const(&out, FA2_F32, 1, 1, 1, 1);
  backward.lse = fa2_dense_const(&lse, FA2_F32, 1, 1, 1, 1);
  backward.dq = fa2_dense(&dq, FA2_F32, 1, 1, 1, 1);
  backward.dk = fa2_dense(&dk, FA2_F32, 1, 1, 1, 1);
  backward.dv = fa2_dense(&dv, FA2_F32, 1, 1, 1, 1);
  if (fa2_attention_backward(&backward, NULL) != FA2_OK) {
    fprintf(stderr, "%s\n", fa2_last_error());
    return 1;
  }
  printf("out %g, lse %g, dq %g, dk %g, dv %g\n", out, lse, dq, dk, dv);
  return out == v && lse == q * k && dq == 0.0f && dk == 0.0f && dv == dout ? 0
                                                                            : 1;
}
