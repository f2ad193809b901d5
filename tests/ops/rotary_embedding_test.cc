// SPDX-License-Identifier: Apache-2.0

// Rotary position embedding against float64, in any memory order.
#include <cmath>
#include <string>
#include <vector>

#include "tests/ops/ops_test_util.h"

namespace fa2::test {
namespace {

class Rotary : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, Rotary,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16, DType::kF64),
                         [](const auto& info) { return NameOf(info.param); });

struct Case {
  int64_t batch, heads, length, dim, turned;
  bool interleaved;
  bool angles_by_batch;
  bool heads_inside;  // in memory [B, N, H, D], else [B, H, N, D]
};

// [B, H, N, dim] in an array of rows.
TensorView View(Array* x, const Case& c) {
  TensorView view = x->view();
  const int64_t row = view.strides[2];
  view.sizes = {c.batch, c.heads, c.length, c.dim};
  view.strides = {c.heads * c.length * row,
                  c.heads_inside ? row : c.length * row,
                  c.heads_inside ? c.heads * row : row, 1};
  return view;
}

void TestRotary(DType dtype, DType angle_dtype, const Case& c) {
  SCOPED_TRACE(std::to_string(c.batch) + " x " + std::to_string(c.heads) +
               " x " + std::to_string(c.length) + " x " +
               std::to_string(c.dim) + ", " + std::to_string(c.turned));
  const int64_t rows = c.batch * c.heads * c.length;
  const int64_t pairs = c.turned / 2;
  const int64_t tables = c.angles_by_batch ? c.batch : 1;
  Array x(dtype, rows, c.dim, 3), y(dtype, rows, c.dim, 1);
  Array dx(dtype, rows, c.dim, 2);
  Array cos(angle_dtype, tables * c.length, pairs, 1);
  Array sin(angle_dtype, tables * c.length, pairs, 5);
  x.Fill(Normal(1));
  cos.Fill(Normal(2));
  sin.Fill(Normal(3));
  const auto angles = [&](Array* table) {
    TensorView view = table->view();
    view.sizes = {tables, 1, c.length, pairs};
    view.strides[0] = c.length * view.strides[2];
    return view;
  };
  RotaryEmbeddingArgs args;
  args.x = View(&x, c);
  args.cos = angles(&cos);
  args.sin = angles(&sin);
  args.interleaved = c.interleaved;
  args.y = View(&y, c);
  RotaryEmbeddingBackwardArgs back;
  back.dy = args.x;
  back.cos = args.cos;
  back.sin = args.sin;
  back.interleaved = c.interleaved;
  back.dx = View(&dx, c);

  const auto position = [&](int64_t row) {
    const int64_t inside = row % (c.heads * c.length);
    const int64_t n = c.heads_inside ? inside / c.heads : inside % c.length;
    return (c.angles_by_batch ? row / (c.heads * c.length) * c.length : 0) + n;
  };
  // The two products that make element i, as their sum or the sum of sizes.
  const auto turn = [&](int64_t row, int64_t i, double sign, bool sizes) {
    if (i >= 2 * pairs) return sizes ? 0.0 : x.Get(row, i);
    const bool second = c.interleaved ? i % 2 == 1 : i >= pairs;
    const int64_t pair = c.interleaved ? i / 2 : i % pairs;
    const int64_t other = c.interleaved ? (second ? i - 1 : i + 1)
                                        : (second ? i - pairs : i + pairs);
    const double first_term = x.Get(row, i) * cos.Get(position(row), pair);
    const double second_term = (second ? sign : -sign) * x.Get(row, other) *
                               sin.Get(position(row), pair);
    return sizes ? std::abs(first_term) + std::abs(second_term)
                 : first_term + second_term;
  };
  OnAllTargets(
      [&](Context* context) {
        ExpectOk(RotaryEmbedding(args, context));
        ExpectOk(RotaryEmbeddingBackward(back, context));
        std::vector<uint8_t> all = y.bytes();
        all.insert(all.end(), dx.bytes().begin(), dx.bytes().end());
        return all;
      },
      [&] {
        for (const double sign : {1.0, -1.0}) {
          ExpectNear(
              sign > 0 ? "y" : "dx", sign > 0 ? y : dx,
              [&](int64_t row, int64_t i) { return turn(row, i, sign, false); },
              [&](int64_t row, int64_t i) {
                return 2 * Eps(dtype) * turn(row, i, sign, true);
              });
        }
        EXPECT_TRUE(y.PaddingIntact() && dx.PaddingIntact());
      });
}

TEST_P(Rotary, ForwardAndBackward) {
  for (const bool interleaved : {false, true}) {
    for (const bool heads_inside : {false, true}) {
      for (const bool by_batch : {false, true}) {
        for (const auto& [dim, turned] :
             std::vector<std::pair<int64_t, int64_t>>{{2, 2},
                                                      {7, 6},
                                                      {16, 16},
                                                      {34, 34},
                                                      {64, 64},
                                                      {128, 128},
                                                      {80, 32},
                                                      {65, 0},
                                                      {5, 4},
                                                      {37, 36}}) {
          const Case c = {2,      3,           5,        dim,
                          turned, interleaved, by_batch, heads_inside};
          TestRotary(GetParam(), GetParam(), c);
          TestRotary(GetParam(), DType::kF32, c);
        }
      }
    }
    // Several items of work.
    TestRotary(GetParam(), DType::kF32,
               {3, 2, 701, 64, 64, interleaved, true, false});
    TestRotary(GetParam(), DType::kF32,
               {1, 4, 701, 96, 64, interleaved, false, true});
    TestRotary(GetParam(), DType::kF32,
               {0, 4, 7, 8, 8, interleaved, false, true});
  }
}

TEST(RotaryErrors, AreSentences) {
  Array x(DType::kF32, 4, 6), y(DType::kF32, 4, 6);
  Array cos(DType::kF32, 4, 3), sin(DType::kF32, 4, 3);
  const std::vector<uint8_t> before = y.bytes();
  RotaryEmbeddingArgs args;
  const auto reset = [&] {
    args.x = x.view();
    args.cos = cos.view();
    args.sin = sin.view();
    args.y = y.view();
  };
  const auto expect = [&](const std::string& sentence) {
    const Status status = RotaryEmbedding(args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), sentence);
    EXPECT_EQ(y.bytes(), before);
    reset();
  };
  reset();
  args.cos.sizes[3] = 4;
  args.cos.strides[2] = 4;
  expect(
      "cos is [1, 1, 4, 4]; it must be [1 or B, 1, N, R / 2] with R <= dim, "
      "where x is [1, 1, 4, 6]");
  args.sin.sizes[3] = 2;
  expect(
      "sin has shape [1, 1, 4, 2]; it must be [1, 1, 4, 3], the shape of cos");
  args.cos.dtype = DType::kF16;
  expect("cos has dtype f16; it must be f32, as x has");
  args.y.sizes[2] = 3;
  expect("y has shape [1, 1, 3, 6]; it must be [1, 1, 4, 6], the shape of x");
  args.y = x.view();
  expect("y overlaps the input x; inputs are never written");
  RotaryEmbeddingBackwardArgs back;
  back.dy = x.view();
  back.cos = cos.view();
  back.sin = sin.view();
  EXPECT_EQ(
      RotaryEmbeddingBackward(back).message(),
      "dx has shape [0, 0, 0, 0]; it must be [1, 1, 4, 6], the shape of dy");
}

}  // namespace
}  // namespace fa2::test
