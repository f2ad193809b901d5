// SPDX-License-Identifier: Apache-2.0

// Softmax and RMS norm against float64.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/ops/ops_test_util.h"

namespace fa2::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  int64_t rows, dim;
};
const std::vector<Shape> kShapes = {
    {0, 3},   {3, 0},  {1, 1},   {2, 2},     {5, 7},    {17, 16}, {3, 17},
    {67, 31}, {4, 64}, {3, 127}, {257, 129}, {2, 1031}, {2, 5003}};

// Terms that one f32 sum takes before it is added up in f64: at most 256 a
// lane, then the lanes (see SumRow); 4 more operations make a term.
double SumTerms(int64_t dim) {
  return static_cast<double>(std::min<int64_t>(dim, 272)) + 4;
}

std::vector<double> SoftmaxOf(const Array& x, int64_t row) {
  std::vector<double> p(static_cast<size_t>(x.dim()));
  double max = -kInf;
  double sum = 0;
  for (int64_t i = 0; i < x.dim(); ++i) max = std::max(max, x.Get(row, i));
  for (int64_t i = 0; i < x.dim(); ++i) {
    sum += p[static_cast<size_t>(i)] = std::exp(x.Get(row, i) - max);
  }
  for (double& v : p) v /= sum;
  return p;
}

class RowOps : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, RowOps,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16, DType::kF64),
                         [](const auto& info) { return NameOf(info.param); });

TEST_P(RowOps, Softmax) {
  for (const Shape& shape : kShapes) {
    Array x(GetParam(), shape.rows, shape.dim, 3);
    Array y(GetParam(), shape.rows, shape.dim, 5);
    // Scores in the tens reach the ends of exp's range.
    x.Fill(Normal(1, 20.0f));
    if (shape.rows > 1 && shape.dim > 1) {
      x.Set(1, 0, -kInf);
      x.Set(0, shape.dim - 1, 1e4f);
    }
    OnAllTargets(
        [&](Context* context) {
          ExpectOk(Softmax(x.view(), y.view(), context));
          return y.bytes();
        },
        [&] {
          for (int64_t row = 0; row < shape.rows; ++row) {
            const std::vector<double> p = SoftmaxOf(x, row);
            double max = -kInf;
            for (int64_t i = 0; i < shape.dim; ++i) {
              max = std::max(max, x.Get(row, i));
            }
            for (int64_t i = 0; i < shape.dim; ++i) {
              const double want = p[static_cast<size_t>(i)];
              // The difference to the maximum is rounded before exp.
              const double exponent = want > 0 ? max - x.Get(row, i) : 0.0;
              ASSERT_NEAR(
                  y.Get(row, i), want,
                  want * Eps(GetParam()) * (SumTerms(shape.dim) + exponent) +
                      StoreError(GetParam(), want))
                  << row << ", " << i << " of " << shape.dim;
            }
          }
          EXPECT_TRUE(y.PaddingIntact());
        });
  }
}

TEST_P(RowOps, SoftmaxBackward) {
  for (const Shape& shape : kShapes) {
    Array y(GetParam(), shape.rows, shape.dim, 3);
    Array dy(GetParam(), shape.rows, shape.dim, 1);
    Array dx(GetParam(), shape.rows, shape.dim, 5);
    y.Fill(Normal(2));
    dy.Fill(Normal(3));
    OnAllTargets(
        [&](Context* context) {
          ExpectOk(SoftmaxBackward(dy.view(), y.view(), dx.view(), context));
          return dx.bytes();
        },
        [&] {
          std::vector<double> sum(static_cast<size_t>(shape.rows));
          std::vector<double> size(sum.size());
          for (int64_t row = 0; row < shape.rows; ++row) {
            for (int64_t i = 0; i < shape.dim; ++i) {
              const double term = y.Get(row, i) * dy.Get(row, i);
              sum[static_cast<size_t>(row)] += term;
              size[static_cast<size_t>(row)] += std::abs(term);
            }
          }
          ExpectNear(
              "dx", dx,
              [&](int64_t row, int64_t i) {
                return y.Get(row, i) *
                       (dy.Get(row, i) - sum[static_cast<size_t>(row)]);
              },
              [&](int64_t row, int64_t i) {
                return Eps(GetParam()) * std::abs(y.Get(row, i)) *
                       (2 * std::abs(dy.Get(row, i)) +
                        SumTerms(shape.dim) * size[static_cast<size_t>(row)]);
              });
          EXPECT_TRUE(dx.PaddingIntact());
        });
  }
}

double ReciprocalRms(const Array& x, int64_t row, double eps) {
  double sum = 0;
  for (int64_t i = 0; i < x.dim(); ++i) sum += x.Get(row, i) * x.Get(row, i);
  return 1 / std::sqrt(sum / static_cast<double>(x.dim()) + eps);
}

TEST_P(RowOps, RmsNorm) {
  for (const DType weight_type : {DType::kF32, GetParam()}) {
    for (const Shape& shape : kShapes) {
      Array x(GetParam(), shape.rows, shape.dim, 3);
      Array weight(weight_type, 1, shape.dim);
      Array y(GetParam(), shape.rows, shape.dim, 5);
      x.Fill(Normal(4, 3.0f));
      weight.Fill(Normal(5));
      OnAllTargets(
          [&](Context* context) {
            ExpectOk(RmsNorm(x.view(), weight.view(), 1e-5, y.view(), context));
            return y.bytes();
          },
          [&] {
            std::vector<double> r;
            for (int64_t row = 0; row < shape.rows; ++row) {
              r.push_back(ReciprocalRms(x, row, 1e-5));
            }
            const auto want = [&](int64_t row, int64_t i) {
              return x.Get(row, i) * r[static_cast<size_t>(row)] *
                     weight.Get(0, i);
            };
            ExpectNear("y", y, want, [&](int64_t row, int64_t i) {
              return Eps(GetParam()) * SumTerms(shape.dim) *
                     std::abs(want(row, i));
            });
            EXPECT_TRUE(y.PaddingIntact());
          });
    }
  }
}

// dweight is a sum over rows; with `accumulate` it holds something before.
void TestRmsNormBackward(DType dtype, DType weight_type, const Shape& shape,
                         bool accumulate) {
  const double eps = 1e-3;
  Array x(dtype, shape.rows, shape.dim, 3);
  Array dy(dtype, shape.rows, shape.dim, 0);
  Array weight(weight_type, 1, shape.dim);
  Array dx(dtype, shape.rows, shape.dim, 5);
  Array dweight(weight_type, 1, shape.dim);
  Array before(weight_type, 1, shape.dim);
  x.Fill(Normal(6, 2.0f));
  dy.Fill(Normal(7));
  weight.Fill(Normal(8));
  before.Fill(Normal(9, 10.0f));
  RmsNormBackwardArgs args;
  args.dy = dy.view();
  args.x = x.view();
  args.weight = weight.view();
  args.eps = eps;
  args.dx = dx.view();
  args.dweight = dweight.view();
  args.accumulate_dweight = accumulate;

  const auto rows = static_cast<size_t>(shape.rows);
  const auto n = static_cast<double>(shape.dim);
  std::vector<double> r(rows), dot(rows), dot_size(rows);
  for (size_t row = 0; row < rows; ++row) {
    const auto at = static_cast<int64_t>(row);
    r[row] = ReciprocalRms(x, at, eps);
    for (int64_t i = 0; i < shape.dim; ++i) {
      const double term = x.Get(at, i) * weight.Get(0, i) * dy.Get(at, i);
      dot[row] += term;
      dot_size[row] += std::abs(term);
    }
  }
  OnAllTargets(
      [&](Context* context) {
        for (int64_t i = 0; i < shape.dim; ++i) {
          dweight.Set(0, i, static_cast<float>(before.Get(0, i)));
        }
        ExpectOk(RmsNormBackward(args, context));
        std::vector<uint8_t> all = dx.bytes();
        all.insert(all.end(), dweight.bytes().begin(), dweight.bytes().end());
        return all;
      },
      [&] {
        ExpectNear(
            "dx", dx,
            [&](int64_t row, int64_t i) {
              const auto at = static_cast<size_t>(row);
              return weight.Get(0, i) * r[at] * dy.Get(row, i) -
                     x.Get(row, i) * std::pow(r[at], 3) / n * dot[at];
            },
            [&](int64_t row, int64_t i) {
              const auto at = static_cast<size_t>(row);
              return Eps(dtype) * SumTerms(shape.dim) *
                     (std::abs(weight.Get(0, i) * r[at] * dy.Get(row, i)) +
                      2 * std::abs(x.Get(row, i)) * std::pow(r[at], 3) / n *
                          dot_size[at]);
            });
        const auto sum = [&](int64_t i, bool sizes) {
          double total = 0;
          for (int64_t row = 0; row < shape.rows; ++row) {
            const double term =
                x.Get(row, i) * r[static_cast<size_t>(row)] * dy.Get(row, i);
            total += sizes ? std::abs(term) : term;
          }
          return total + (accumulate ? (sizes ? std::abs(before.Get(0, i))
                                              : before.Get(0, i))
                                     : 0.0);
        };
        // Rows of a piece, then pieces, are added one by one.
        const double terms = std::max(32.0, shape.rows / 256.0) +
                             std::min(256.0, shape.rows / 32.0) +
                             SumTerms(shape.dim);
        ExpectNear(
            "dweight", dweight,
            [&](int64_t, int64_t i) { return sum(i, false); },
            [&](int64_t, int64_t i) {
              return Eps(dtype) * terms * sum(i, true);
            });
        EXPECT_TRUE(dx.PaddingIntact() && dweight.PaddingIntact());
      });
}

TEST_P(RowOps, RmsNormBackward) {
  for (const Shape& shape : kShapes) {
    TestRmsNormBackward(GetParam(), GetParam(), shape, true);
    TestRmsNormBackward(GetParam(), DType::kF32, shape, false);
  }
  TestRmsNormBackward(GetParam(), DType::kF32, {9001, 3}, true);
}

// 9 MiB and more are written by non-temporal stores.
TEST_P(RowOps, LargeResultsAreTheSameBits) {
  const int64_t dim = 1201;
  const int64_t rows = 8000 / static_cast<int64_t>(SizeOf(GetParam()));
  Array x(GetParam(), rows, dim), dy(GetParam(), rows, dim);
  Array weight(GetParam(), 1, dim), dweight(GetParam(), 1, dim);
  Array large(GetParam(), rows, dim), small(GetParam(), 10, dim);
  x.Fill(Normal(10));
  dy.Fill(Normal(11));
  weight.Fill(Normal(12));
  const auto first_rows = [](TensorView view) {
    view.sizes[2] = 10;
    return view;
  };
  for (const std::string& target : Targets()) {
    SCOPED_TRACE(target);
    const auto context = MakeContext(target, 3);
    const auto expect_same = [&](const char* name) {
      for (int64_t row = 0; row < 10; ++row) {
        for (int64_t i = 0; i < dim; ++i) {
          ASSERT_EQ(large.Get(row, i), small.Get(row, i))
              << name << " " << row << ", " << i;
        }
      }
      EXPECT_TRUE(large.PaddingIntact()) << name;
    };
    ExpectOk(Softmax(x.view(), large.view(), context.get()));
    ExpectOk(Softmax(first_rows(x.view()), small.view(), context.get()));
    expect_same("Softmax");
    ExpectOk(SoftmaxBackward(dy.view(), x.view(), large.view(), context.get()));
    ExpectOk(SoftmaxBackward(first_rows(dy.view()), first_rows(x.view()),
                             small.view(), context.get()));
    expect_same("SoftmaxBackward");
    ExpectOk(
        RmsNorm(x.view(), weight.view(), 1e-5, large.view(), context.get()));
    ExpectOk(RmsNorm(first_rows(x.view()), weight.view(), 1e-5, small.view(),
                     context.get()));
    expect_same("RmsNorm");
    RmsNormBackwardArgs args;
    args.dy = dy.view();
    args.x = x.view();
    args.weight = weight.view();
    args.dx = large.view();
    args.dweight = dweight.view();
    ExpectOk(RmsNormBackward(args, context.get()));
    args.dy = first_rows(dy.view());
    args.x = first_rows(x.view());
    args.dx = small.view();
    args.dweight = {};
    ExpectOk(RmsNormBackward(args, context.get()));
    expect_same("RmsNormBackward");
  }
}

// A NaN or inf in a row reaches all of that row, since all depends on it, and
// no other row.
TEST_P(RowOps, NonFiniteStaysInItsRow) {
  for (const float bad : {kNan, kInf}) {
    for (const int64_t dim : {1, 5, 16, 33, 3000}) {
      for (const int64_t at : {int64_t{0}, dim / 2, dim - 1}) {
        Array x(GetParam(), 3, dim), y(GetParam(), 3, dim);
        Array dy(GetParam(), 3, dim), weight(GetParam(), 1, dim);
        x.Fill(Normal(13));
        dy.Fill(Normal(14));
        weight.Fill(Normal(15));
        x.Set(1, at, bad);
        for (const std::string& target : Targets()) {
          SCOPED_TRACE(target + ", " + std::to_string(at) + " of " +
                       std::to_string(dim));
          const auto context = MakeContext(target, 1);
          const auto expect = [&](const char* name, bool whole_row) {
            for (int64_t i = 0; i < dim; ++i) {
              ASSERT_TRUE(std::isfinite(y.Get(0, i))) << name << " " << i;
              ASSERT_TRUE(std::isfinite(y.Get(2, i))) << name << " " << i;
              if (whole_row) {
                ASSERT_TRUE(std::isnan(y.Get(1, i))) << name << " " << i;
              }
              if (i == at) {
                ASSERT_FALSE(std::isfinite(y.Get(1, i))) << name << " " << i;
              }
            }
          };
          ExpectOk(Softmax(x.view(), y.view(), context.get()));
          expect("Softmax", true);
          ExpectOk(
              SoftmaxBackward(dy.view(), x.view(), y.view(), context.get()));
          expect("SoftmaxBackward", std::isnan(bad));
          ExpectOk(
              RmsNorm(x.view(), weight.view(), 1e-5, y.view(), context.get()));
          expect("RmsNorm", std::isnan(bad));
          RmsNormBackwardArgs args;
          args.dy = dy.view();
          args.x = x.view();
          args.weight = weight.view();
          args.dx = y.view();
          ExpectOk(RmsNormBackward(args, context.get()));
          expect("RmsNormBackward", std::isnan(bad));
        }
      }
    }
  }
}

TEST_P(RowOps, SoftmaxOfMinusInfinity) {
  // More than one chunk of 2,048: the first holds nothing but -inf.
  const int64_t dim = 5000;
  Array x(GetParam(), 2, dim), y(GetParam(), 2, dim);
  x.Fill([] { return -kInf; });
  x.Set(0, 4001, 3.0f);
  for (const std::string& target : Targets()) {
    SCOPED_TRACE(target);
    ExpectOk(Softmax(x.view(), y.view(), MakeContext(target, 1).get()));
    for (int64_t i = 0; i < dim; ++i) {
      ASSERT_EQ(y.Get(0, i), i == 4001 ? 1.0 : 0.0) << i;
      ASSERT_TRUE(std::isnan(y.Get(1, i))) << i;
    }
  }
}

// Rows through three dimensions with permuted and negative strides.
TEST_P(RowOps, StridedRows) {
  const int64_t b = 3, h = 4, n = 5, dim = 19;
  Array memory(GetParam(), b * h * n, dim), dense(GetParam(), b * h * n, dim);
  Array y(GetParam(), b * h * n, dim), expected(GetParam(), b * h * n, dim);
  memory.Fill(Normal(16));
  TensorView x = memory.view();
  // [b, h, n, d] seen in memory as [n, b, h, d], b backwards.
  x.sizes = {b, h, n, dim};
  x.strides = {-h * dim, dim, b * h * dim, 1};
  x.data = static_cast<uint8_t*>(x.data) +
           static_cast<size_t>((b - 1) * h * dim) * SizeOf(GetParam());
  for (int64_t row = 0; row < b * h * n; ++row) {
    const int64_t bi = row / (h * n), hi = row / n % h, ni = row % n;
    for (int64_t i = 0; i < dim; ++i) {
      dense.Set(
          row, i,
          static_cast<float>(memory.Get((ni * b + (b - 1 - bi)) * h + hi, i)));
    }
  }
  TensorView out = y.view();
  out.sizes = {b, h, n, dim};
  out.strides = DenseStrides(out.sizes);
  ExpectOk(Softmax(x, out));
  ExpectOk(Softmax(dense.view(), expected.view()));
  EXPECT_EQ(y.bytes(), expected.bytes());
}

TEST_P(RowOps, SecondCallAllocatesNothing) {
  Array x(GetParam(), 100, 50), dy(GetParam(), 100, 50);
  Array weight(GetParam(), 1, 50), dweight(GetParam(), 1, 50);
  x.Fill(Normal(17));
  dy.Fill(Normal(18));
  weight.Fill(Normal(19));
  RmsNormBackwardArgs args;
  args.dy = dy.view();
  args.x = x.view();
  args.weight = weight.view();
  args.dweight = dweight.view();
  const auto context = MakeContext("", 2);
  ASSERT_NE(context, nullptr);
  ExpectOk(RmsNormBackward(args, context.get()));
  const size_t count = context->AllocationCount();
  EXPECT_GT(count, 0u);
  ExpectOk(RmsNormBackward(args, context.get()));
  EXPECT_EQ(context->AllocationCount(), count);
}

}  // namespace
}  // namespace fa2::test
