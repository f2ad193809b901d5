// SPDX-License-Identifier: Apache-2.0

// SwiGLU and its backward against float64.
#include <cmath>
#include <limits>
#include <vector>

#include "tests/ops/ops_test_util.h"

namespace fa2::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

class SwiGluOps : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, SwiGluOps,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16, DType::kF64),
                         [](const auto& info) { return NameOf(info.param); });

TEST_P(SwiGluOps, ForwardAndBackward) {
  const DType dtype = GetParam();
  struct Shape {
    int64_t rows, dim;
  };
  for (const auto& [rows, dim] :
       {Shape{0, 3}, Shape{3, 0}, Shape{1, 1}, Shape{5, 7}, Shape{3, 17},
        Shape{64, 64}, Shape{257, 129}, Shape{2, 5003}}) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(dim));
    Array gate(dtype, rows, dim, 3), up(dtype, rows, dim, 1);
    Array dy(dtype, rows, dim, 2), y(dtype, rows, dim, 5);
    Array dgate(dtype, rows, dim, 4), dup(dtype, rows, dim, 1);
    // Gates in the tens reach where the sigmoid is 0 or 1.
    gate.Fill(Normal(1, 12.0f));
    up.Fill(Normal(2));
    dy.Fill(Normal(3));
    SwiGluBackwardArgs args;
    args.dy = dy.view();
    args.gate = gate.view();
    args.up = up.view();
    args.dgate = dgate.view();
    args.dup = dup.view();
    // Roundings of exp, the sigmoid and the products.
    const double bound = 16 * Eps(dtype);
    OnAllTargets(
        [&](Context* context) {
          ExpectOk(SwiGlu(gate.view(), up.view(), y.view(), context));
          ExpectOk(SwiGluBackward(args, context));
          std::vector<uint8_t> all = y.bytes();
          for (const Array* x : {&dgate, &dup}) {
            all.insert(all.end(), x->bytes().begin(), x->bytes().end());
          }
          return all;
        },
        [&] {
          const auto silu = [&](int64_t row, int64_t i) {
            return gate.Get(row, i) * Sigmoid(gate.Get(row, i));
          };
          const auto want_y = [&](int64_t row, int64_t i) {
            return silu(row, i) * up.Get(row, i);
          };
          const auto want_dup = [&](int64_t row, int64_t i) {
            return silu(row, i) * dy.Get(row, i);
          };
          const auto slope_parts = [&](int64_t row, int64_t i, double sign) {
            const double g = gate.Get(row, i);
            const double s = Sigmoid(g);
            return s * (1 + (sign == 0 ? g : std::abs(g)) * Sigmoid(-g));
          };
          ExpectNear("y", y, want_y, [&](int64_t row, int64_t i) {
            return bound * std::abs(want_y(row, i)) + 1e-36;
          });
          ExpectNear("dup", dup, want_dup, [&](int64_t row, int64_t i) {
            return bound * std::abs(want_dup(row, i)) + 1e-36;
          });
          ExpectNear(
              "dgate", dgate,
              [&](int64_t row, int64_t i) {
                return dy.Get(row, i) * up.Get(row, i) * slope_parts(row, i, 0);
              },
              [&](int64_t row, int64_t i) {
                // 1 - s is as inexact as s.
                return bound * std::abs(dy.Get(row, i) * up.Get(row, i) *
                                        Sigmoid(gate.Get(row, i)) *
                                        (1 + std::abs(gate.Get(row, i)))) +
                       1e-36;
              });
          EXPECT_TRUE(y.PaddingIntact() && dgate.PaddingIntact() &&
                      dup.PaddingIntact());
        });
  }
}

TEST_P(SwiGluOps, LargeResultsAreTheSameBits) {
  const int64_t rows = 4000, dim = 1201;
  Array gate(GetParam(), rows, dim), up(GetParam(), rows, dim);
  Array large(GetParam(), rows, dim), small(GetParam(), 10, dim);
  gate.Fill(Normal(4));
  up.Fill(Normal(5));
  TensorView first_gate = gate.view();
  TensorView first_up = up.view();
  first_gate.sizes[2] = first_up.sizes[2] = 10;
  for (const std::string& target : Targets()) {
    const auto context = MakeContext(target, 2);
    ExpectOk(SwiGlu(gate.view(), up.view(), large.view(), context.get()));
    ExpectOk(SwiGlu(first_gate, first_up, small.view(), context.get()));
    for (int64_t row = 0; row < 10; ++row) {
      for (int64_t i = 0; i < dim; ++i) {
        ASSERT_EQ(large.Get(row, i), small.Get(row, i)) << target;
      }
    }
  }
}

TEST_P(SwiGluOps, NonFiniteStaysInItsElement) {
  Array gate(GetParam(), 2, 37), up(GetParam(), 2, 37), y(GetParam(), 2, 37);
  for (const float bad : {kNan, kInf}) {
    gate.Fill(Normal(6));
    up.Fill([] { return 1.0f; });
    gate.Set(1, 35, bad);
    for (const std::string& target : Targets()) {
      ExpectOk(SwiGlu(gate.view(), up.view(), y.view(),
                      MakeContext(target, 1).get()));
      for (int64_t row = 0; row < 2; ++row) {
        for (int64_t i = 0; i < 37; ++i) {
          ASSERT_EQ(std::isfinite(y.Get(row, i)), row != 1 || i != 35)
              << target << ": " << row << ", " << i;
        }
      }
    }
  }
}

TEST_P(SwiGluOps, EitherGradientAlone) {
  Array gate(GetParam(), 3, 21), up(GetParam(), 3, 21), dy(GetParam(), 3, 21);
  Array dgate(GetParam(), 3, 21), dup(GetParam(), 3, 21);
  Array alone(GetParam(), 3, 21);
  gate.Fill(Normal(7));
  up.Fill(Normal(8));
  dy.Fill(Normal(9));
  SwiGluBackwardArgs args;
  args.dy = dy.view();
  args.gate = gate.view();
  args.up = up.view();
  args.dgate = dgate.view();
  args.dup = dup.view();
  ExpectOk(SwiGluBackward(args));
  args.dup = {};
  args.dgate = alone.view();
  ExpectOk(SwiGluBackward(args));
  EXPECT_EQ(alone.bytes(), dgate.bytes());
  args.dgate = {};
  args.dup = alone.view();
  ExpectOk(SwiGluBackward(args));
  EXPECT_EQ(alone.bytes(), dup.bytes());
}

TEST(SwiGluErrors, AreSentences) {
  Array gate(DType::kF32, 3, 5), up(DType::kF32, 3, 5), y(DType::kF32, 3, 5);
  Array short_up(DType::kF32, 3, 4), f16(DType::kF16, 3, 5);
  const auto expect = [](const Status& status, const std::string& sentence) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), sentence);
  };
  expect(
      SwiGlu(gate.view(), short_up.view(), y.view()),
      "up has shape [1, 1, 3, 4]; it must be [1, 1, 3, 5], the shape of gate");
  expect(SwiGlu(gate.view(), f16.view(), y.view()),
         "up has dtype f16; it must be f32, as gate has");
  expect(SwiGlu(gate.view(), up.view(), gate.view()),
         "y overlaps the input gate; inputs are never written");
  SwiGluBackwardArgs args;
  args.dy = y.view();
  args.gate = gate.view();
  args.up = up.view();
  args.dgate = short_up.view();
  expect(SwiGluBackward(args),
         "dgate has shape [1, 1, 3, 4]; it must be [1, 1, 3, 5], the shape of "
         "gate");
}

}  // namespace
}  // namespace fa2::test
