// SPDX-License-Identifier: Apache-2.0

/* The training kernels through the C interface: each argument arrives, on small
 * problems with results that can be worked out. */
#include "check.h"

static int near(double actual, double expected) {
  return fabs(actual - expected) <= 1e-6 * (1.0 + fabs(expected));
}

static void test_transpose(void) {
  const float in[6] = {1, 2, 3, 4, 5, 6};
  float out[6] = {0};
  fa2_const_tensor x = fa2_dense_const(in, FA2_F32, 1, 1, 2, 3);
  fa2_tensor y = fa2_dense(out, FA2_F32, 1, 1, 3, 2);
  CHECK_OK(fa2_transpose_2d(&x, &y, NULL));
  for (int r = 0; r < 2; ++r)
    for (int c = 0; c < 3; ++c) CHECK(out[c * 2 + r] == in[r * 3 + c]);
  CHECK_FAILS(fa2_transpose_2d(NULL, &y, NULL), FA2_INVALID_ARGUMENT,
              "in is NULL");
  CHECK_FAILS(fa2_transpose_2d(&x, NULL, NULL), FA2_INVALID_ARGUMENT,
              "out is NULL");
  x.dtype = 9;
  CHECK_FAILS(fa2_transpose_2d(&x, &y, NULL), FA2_INVALID_ARGUMENT,
              "in.dtype is 9");
}

static void test_softmax(void) {
  const float x[3] = {0.5f, -1.0f, 2.0f}, dy[3] = {1.0f, 2.0f, -1.0f};
  float y[3] = {0}, dx[3] = {0};
  double sum = 0.0, dot = 0.0;
  const fa2_const_tensor x_view = fa2_dense_const(x, FA2_F32, 1, 1, 1, 3);
  const fa2_const_tensor dy_view = fa2_dense_const(dy, FA2_F32, 1, 1, 1, 3);
  const fa2_const_tensor y_view = fa2_dense_const(y, FA2_F32, 1, 1, 1, 3);
  const fa2_tensor y_out = fa2_dense(y, FA2_F32, 1, 1, 1, 3);
  const fa2_tensor dx_out = fa2_dense(dx, FA2_F32, 1, 1, 1, 3);
  CHECK_OK(fa2_softmax(&x_view, &y_out, NULL));
  CHECK_OK(fa2_softmax_backward(&dy_view, &y_view, &dx_out, NULL));
  for (int i = 0; i < 3; ++i) sum += exp(x[i]);
  for (int i = 0; i < 3; ++i) dot += exp(x[i]) / sum * dy[i];
  for (int i = 0; i < 3; ++i) {
    CHECK(near(y[i], exp(x[i]) / sum));
    CHECK(near(dx[i], exp(x[i]) / sum * (dy[i] - dot)));
  }
  CHECK_FAILS(fa2_softmax(&x_view, NULL, NULL), FA2_INVALID_ARGUMENT,
              "y is NULL");
  CHECK_FAILS(fa2_softmax_backward(NULL, &y_view, &dx_out, NULL),
              FA2_INVALID_ARGUMENT, "dy is NULL");
}

static void test_rms_norm(void) {
  const float x[2] = {3.0f, 4.0f}, weight[2] = {2.0f, 0.5f};
  const float dy[2] = {1.0f, -2.0f};
  const double eps = 0.25;
  float y[2] = {0}, dx[2] = {0}, dweight[2] = {10.0f, 20.0f};
  const fa2_const_tensor x_view = fa2_dense_const(x, FA2_F32, 1, 1, 1, 2);
  const fa2_const_tensor w_view = fa2_dense_const(weight, FA2_F32, 1, 1, 1, 2);
  const fa2_tensor y_view = fa2_dense(y, FA2_F32, 1, 1, 1, 2);
  const double r = 1.0 / sqrt((9.0 + 16.0) / 2.0 + eps);
  const double dot = x[0] * weight[0] * dy[0] + x[1] * weight[1] * dy[1];
  fa2_rms_norm_backward_args args = {0};
  CHECK_OK(fa2_rms_norm(&x_view, &w_view, eps, &y_view, NULL));
  for (int i = 0; i < 2; ++i) CHECK(near(y[i], x[i] * r * weight[i]));
  args.struct_size = sizeof args;
  args.dy = fa2_dense_const(dy, FA2_F32, 1, 1, 1, 2);
  args.x = x_view;
  args.weight = w_view;
  args.eps = eps;
  args.dx = fa2_dense(dx, FA2_F32, 1, 1, 1, 2);
  args.dweight = fa2_dense(dweight, FA2_F32, 1, 1, 1, 2);
  CHECK_OK(fa2_rms_norm_backward(&args, NULL));
  for (int i = 0; i < 2; ++i) {
    CHECK(near(dx[i], weight[i] * r * dy[i] - x[i] * r * r * r / 2.0 * dot));
    CHECK(near(dweight[i], x[i] * r * dy[i]));
  }
  args.accumulate_dweight = 1;
  CHECK_OK(fa2_rms_norm_backward(&args, NULL));
  for (int i = 0; i < 2; ++i) CHECK(near(dweight[i], 2.0 * x[i] * r * dy[i]));
  args.eps = -1.0;
  CHECK_FAILS(fa2_rms_norm_backward(&args, NULL), FA2_INVALID_ARGUMENT, "eps");
  args.reserved = 1;
  CHECK_FAILS(fa2_rms_norm_backward(&args, NULL), FA2_INVALID_ARGUMENT,
              "args.reserved is 1");
  args.struct_size = 8;
  CHECK_FAILS(fa2_rms_norm_backward(&args, NULL), FA2_INVALID_ARGUMENT,
              "args.struct_size is 8");
}

static void test_embedding(void) {
  const float dy[3] = {1.0f, 2.0f, 4.0f};
  int64_t ids[3] = {1, 3, 1};
  float dweight[4] = {8.0f, 8.0f, 8.0f, 8.0f};
  fa2_embedding_backward_args args = {0};
  args.struct_size = sizeof args;
  args.dy = fa2_dense_const(dy, FA2_F32, 1, 1, 3, 1);
  args.ids = fa2_dense_const(ids, FA2_I64, 1, 1, 1, 3);
  args.dweight = fa2_dense(dweight, FA2_F32, 1, 1, 4, 1);
  args.accumulate_dweight = 1;
  CHECK_OK(fa2_embedding_backward(&args, NULL));
  CHECK(dweight[0] == 8.0f && dweight[1] == 13.0f && dweight[2] == 8.0f &&
        dweight[3] == 10.0f);
  ids[2] = 4;
  CHECK_FAILS(fa2_embedding_backward(&args, NULL), FA2_INVALID_ARGUMENT, "ids");
  CHECK(strstr(fa2_last_error(), "2") != NULL &&
        strstr(fa2_last_error(), "4") != NULL);
  CHECK(dweight[1] == 13.0f);
  ids[2] = 1;
  args.accumulate_dweight = 0;
  CHECK_OK(fa2_embedding_backward(&args, NULL));
  CHECK(dweight[0] == 0.0f && dweight[1] == 5.0f && dweight[3] == 2.0f);
}

static void test_cross_entropy(void) {
  const float logits[6] = {0.0f, 1.0f, -1.0f, 3.0f, 0.5f, 0.0f};
  const int32_t targets[2] = {1, -100};
  const double sum = 1.0 + exp(1.0) + exp(-1.0);
  float loss = 7.0f, dlogits[6];
  fa2_cross_entropy_args args = {0};
  args.struct_size = sizeof args;
  args.logits = fa2_dense_const(logits, FA2_F32, 1, 1, 2, 3);
  args.targets = fa2_dense_const(targets, FA2_I32, 1, 1, 1, 2);
  args.loss = fa2_dense(&loss, FA2_F32, 1, 1, 1, 1);
  args.dlogits = fa2_dense(dlogits, FA2_F32, 1, 1, 2, 3);
  args.accumulate_loss = 1;
  CHECK_OK(fa2_cross_entropy(&args, NULL));
  CHECK(near(loss, 7.0 + log(sum) - 1.0));
  for (int i = 0; i < 3; ++i) {
    CHECK(near(dlogits[i], exp(logits[i]) / sum - (i == 1)));
    CHECK(dlogits[3 + i] == 0.0f);
  }
  args.accumulate_loss = 0;
  args.has_count = 1;
  args.count = 4;
  CHECK_OK(fa2_cross_entropy(&args, NULL));
  CHECK(near(loss, (log(sum) - 1.0) / 4.0));
  args.count = 0;
  loss = 9.0f;
  CHECK_OK(fa2_cross_entropy(&args, NULL));
  CHECK(loss == 9.0f);
  /* -100 is no index once another one is ignored. */
  args.has_ignore_index = 1;
  args.ignore_index = 2;
  args.count = 1;
  CHECK_FAILS(fa2_cross_entropy(&args, NULL), FA2_INVALID_ARGUMENT, "targets");
}

static void test_rotary_embedding(void) {
  const float x[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  const float cos[2][2] = {{1, 0}, {0, 1}};
  const float sin[2][2] = {{0, 1}, {1, 0}};
  const float halves[2][4] = {{1, -4, 3, 2}, {-7, 6, 5, 8}};
  const float neighbours[2][4] = {{1, 2, -4, 3}, {-6, 5, 7, 8}};
  for (int interleaved = 0; interleaved < 2; ++interleaved) {
    float y[2][4] = {{0}}, dx[2][4] = {{0}};
    fa2_rotary_embedding_args args = {0};
    fa2_rotary_embedding_backward_args back = {0};
    args.struct_size = sizeof args;
    args.x = fa2_dense_const(x, FA2_F32, 1, 1, 2, 4);
    args.cos = fa2_dense_const(cos, FA2_F32, 1, 1, 2, 2);
    args.sin = fa2_dense_const(sin, FA2_F32, 1, 1, 2, 2);
    args.y = fa2_dense(y, FA2_F32, 1, 1, 2, 4);
    args.interleaved = interleaved;
    CHECK_OK(fa2_rotary_embedding(&args, NULL));
    back.struct_size = sizeof back;
    back.dy = fa2_dense_const(y, FA2_F32, 1, 1, 2, 4);
    back.cos = args.cos;
    back.sin = args.sin;
    back.dx = fa2_dense(dx, FA2_F32, 1, 1, 2, 4);
    back.interleaved = interleaved;
    CHECK_OK(fa2_rotary_embedding_backward(&back, NULL));
    for (int i = 0; i < 8; ++i) {
      CHECK((&y[0][0])[i] ==
            (interleaved ? &neighbours[0][0] : &halves[0][0])[i]);
      CHECK((&dx[0][0])[i] == (&x[0][0])[i]);
    }
    args.reserved = 1;
    CHECK_FAILS(fa2_rotary_embedding(&args, NULL), FA2_INVALID_ARGUMENT,
                "args.reserved is 1");
    back.cos.sizes[2] = 3;
    CHECK_FAILS(fa2_rotary_embedding_backward(&back, NULL),
                FA2_INVALID_ARGUMENT, "cos is [1, 1, 3, 2]");
  }
}

static void test_swiglu(void) {
  const float gate[3] = {0, 1, -2}, up[3] = {3, 2, 5}, dy[3] = {1, -1, 2};
  float y[3] = {0}, dgate[3] = {0}, dup[3] = {0};
  const fa2_const_tensor gate_view = fa2_dense_const(gate, FA2_F32, 1, 1, 1, 3);
  const fa2_const_tensor up_view = fa2_dense_const(up, FA2_F32, 1, 1, 1, 3);
  const fa2_tensor y_view = fa2_dense(y, FA2_F32, 1, 1, 1, 3);
  fa2_swiglu_backward_args args = {0};
  CHECK_OK(fa2_swiglu(&gate_view, &up_view, &y_view, NULL));
  args.struct_size = sizeof args;
  args.dy = fa2_dense_const(dy, FA2_F32, 1, 1, 1, 3);
  args.gate = gate_view;
  args.up = up_view;
  args.dgate = fa2_dense(dgate, FA2_F32, 1, 1, 1, 3);
  args.dup = fa2_dense(dup, FA2_F32, 1, 1, 1, 3);
  CHECK_OK(fa2_swiglu_backward(&args, NULL));
  for (int i = 0; i < 3; ++i) {
    const double s = 1 / (1 + exp(-(double)gate[i]));
    CHECK(fabs(y[i] - gate[i] * s * up[i]) <= 1e-6);
    CHECK(fabs(dup[i] - dy[i] * gate[i] * s) <= 1e-6);
    CHECK(fabs(dgate[i] - dy[i] * up[i] * s * (1 + gate[i] * (1 - s))) <= 1e-5);
  }
  CHECK_FAILS(fa2_swiglu(&gate_view, NULL, &y_view, NULL), FA2_INVALID_ARGUMENT,
              "up");
}

int main(void) {
  test_transpose();
  test_softmax();
  test_rms_norm();
  test_rotary_embedding();
  test_swiglu();
  test_embedding();
  test_cross_entropy();
  if (g_failures != 0) fprintf(stderr, "%d checks failed\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}
