// SPDX-License-Identifier: Apache-2.0

// The kernels that read ids: embedding gradient and cross entropy.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/ops/ops_test_util.h"

namespace fa2::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A vector of i32 or i64 with every second element unused.
class Ids {
 public:
  Ids(DType dtype, std::vector<int64_t> values)
      : dtype_(dtype), values_(std::move(values)) {
    for (const int64_t v : values_) {
      wide_.insert(wide_.end(), {v, -77});
      narrow_.insert(narrow_.end(), {static_cast<int32_t>(v), -77});
    }
  }
  ConstTensorView view() const {
    ConstTensorView view =
        Dense(dtype_ == DType::kI64 ? static_cast<const void*>(wide_.data())
                                    : static_cast<const void*>(narrow_.data()),
              dtype_, 1, 1, 1, static_cast<int64_t>(values_.size()));
    view.strides[3] = 2;
    return view;
  }
  int64_t operator[](int64_t i) const {
    return values_[static_cast<size_t>(i)];
  }

 private:
  DType dtype_;
  std::vector<int64_t> values_;
  std::vector<int64_t> wide_;
  std::vector<int32_t> narrow_;
};

std::vector<int64_t> RandomIds(int64_t n, int64_t limit, uint32_t seed) {
  std::mt19937 engine(seed);
  std::vector<int64_t> ids(static_cast<size_t>(n));
  for (int64_t& id : ids) {
    id = static_cast<int64_t>(engine() % static_cast<uint32_t>(limit));
  }
  return ids;
}

class IndexedOps : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, IndexedOps,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16, DType::kF64),
                         [](const auto& info) { return NameOf(info.param); });

void TestEmbedding(DType dtype, DType weight_type, int64_t tokens, int64_t dim,
                   int64_t vocab, std::vector<int64_t> values,
                   bool accumulate) {
  SCOPED_TRACE(std::to_string(tokens) + " tokens of " + std::to_string(dim) +
               ", " + std::to_string(vocab) + " ids");
  const Ids ids(vocab % 2 == 0 ? DType::kI32 : DType::kI64, std::move(values));
  Array dy(dtype, tokens, dim, 3);
  Array before(weight_type, vocab, dim, 2), dweight(weight_type, vocab, dim, 2);
  dy.Fill(Normal(1));
  before.Fill(Normal(2));
  std::vector<double> sum(static_cast<size_t>(vocab * dim)), size(sum.size());
  std::vector<double> count(static_cast<size_t>(vocab));
  for (int64_t t = 0; t < tokens; ++t) {
    count[static_cast<size_t>(ids[t])] += 1;
    for (int64_t i = 0; i < dim; ++i) {
      const auto at = static_cast<size_t>(ids[t] * dim + i);
      sum[at] += dy.Get(t, i);
      size[at] += std::abs(dy.Get(t, i));
    }
  }
  EmbeddingBackwardArgs args;
  args.dy = dy.view();
  args.ids = ids.view();
  args.dweight = dweight.view();
  args.accumulate_dweight = accumulate;
  OnAllTargets(
      [&](Context* context) {
        for (int64_t v = 0; v < vocab; ++v) {
          for (int64_t i = 0; i < dim; ++i) {
            dweight.Set(v, i, static_cast<float>(before.Get(v, i)));
          }
        }
        ExpectOk(EmbeddingBackward(args, context));
        return dweight.bytes();
      },
      [&] {
        const auto held = [&](int64_t v, int64_t i) {
          return accumulate ? before.Get(v, i) : 0.0;
        };
        ExpectNear(
            "dweight", dweight,
            [&](int64_t v, int64_t i) {
              return held(v, i) + sum[static_cast<size_t>(v * dim + i)];
            },
            [&](int64_t v, int64_t i) {
              return Eps(dtype) * count[static_cast<size_t>(v)] *
                     (std::abs(held(v, i)) +
                      size[static_cast<size_t>(v * dim + i)]);
            });
        // Rows that no id names are not touched at all.
        for (int64_t v = 0; v < vocab; ++v) {
          if (count[static_cast<size_t>(v)] != 0) continue;
          for (int64_t i = 0; i < dim; ++i) {
            ASSERT_EQ(dweight.Get(v, i), held(v, i)) << v << ", " << i;
          }
        }
        EXPECT_TRUE(dweight.PaddingIntact());
      });
}

TEST_P(IndexedOps, EmbeddingBackward) {
  struct Case {
    int64_t tokens, dim, vocab;
  };
  for (const auto& [tokens, dim, vocab] :
       {Case{0, 5, 3}, Case{5, 0, 3}, Case{1, 1, 1}, Case{7, 17, 3},
        Case{63, 31, 100}, Case{64, 16, 2}, Case{65, 33, 7},
        Case{1000, 13, 5003}, Case{301, 1031, 11}}) {
    for (const bool accumulate : {true, false}) {
      TestEmbedding(GetParam(), GetParam(), tokens, dim, vocab,
                    RandomIds(tokens, vocab, 3), accumulate);
    }
    TestEmbedding(GetParam(), DType::kF32, tokens, dim, vocab,
                  RandomIds(tokens, vocab, 4), true);
  }
  // One id everywhere, and ids in falling order.
  TestEmbedding(GetParam(), GetParam(), 500, 600, 9,
                std::vector<int64_t>(500, 8), true);
  std::vector<int64_t> falling(200);
  for (size_t i = 0; i < falling.size(); ++i) {
    falling[i] = 4999 - static_cast<int64_t>(i) * 25;
  }
  TestEmbedding(GetParam(), GetParam(), 200, 9, 5000, falling, true);
}

TEST_P(IndexedOps, EmbeddingBackwardKeepsNanInItsElement) {
  Array dy(GetParam(), 3, 40), dweight(GetParam(), 4, 40);
  dy.Fill(Normal(5));
  dy.Set(1, 37, kNan);
  const Ids ids(DType::kI64, {2, 1, 2});
  EmbeddingBackwardArgs args;
  args.dy = dy.view();
  args.ids = ids.view();
  args.dweight = dweight.view();
  for (const std::string& target : Targets()) {
    ExpectOk(EmbeddingBackward(args, MakeContext(target, 1).get()));
    for (int64_t v = 0; v < 4; ++v) {
      for (int64_t i = 0; i < 40; ++i) {
        ASSERT_EQ(std::isnan(dweight.Get(v, i)), v == 1 && i == 37)
            << target << ": " << v << ", " << i;
      }
    }
  }
}

struct LossCase {
  int64_t positions, vocab;
  bool given_count;
  bool accumulate;
  double label_smoothing = 0.0;
  double z_loss = 0.0;
  bool weighted = false;
  bool in_place = false;
};

void TestCrossEntropy(DType dtype, DType loss_type, const LossCase& c) {
  SCOPED_TRACE(std::to_string(c.positions) + " x " + std::to_string(c.vocab));
  constexpr int64_t kIgnore = -100;
  std::vector<int64_t> values = RandomIds(c.positions, c.vocab, 6);
  for (size_t i = 2; i < values.size(); i += 5) values[i] = kIgnore;
  const Ids targets(c.vocab % 2 == 0 ? DType::kI32 : DType::kI64, values);
  Array logits(dtype, c.positions, c.vocab, 3);
  Array dlogits(dtype, c.positions, c.vocab, 1);
  logits.Fill(Normal(7, 8.0f));
  const auto counted = static_cast<int64_t>(
      values.size() -
      static_cast<size_t>(std::count(values.begin(), values.end(), kIgnore)));
  const double count = static_cast<double>(
      c.given_count ? 3 * c.positions + 1 : std::max<int64_t>(1, counted));

  std::vector<double> weights(values.size(), 1.0);
  for (size_t i = 0; c.weighted && i < weights.size(); ++i) {
    weights[i] = 0.25 * static_cast<double>(i % 7);
  }
  const double smoothing = c.label_smoothing;
  const double vocab = static_cast<double>(c.vocab);
  double loss = c.accumulate ? 0.75 : 0.0;
  double loss_size = loss;
  double z_loss = loss;
  std::vector<double> max(values.size()), sum(values.size()), lse(max);
  std::vector<double> losses(values.size()), sizes(values.size());
  for (int64_t row = 0; row < c.positions; ++row) {
    const auto at = static_cast<size_t>(row);
    max[at] = -std::numeric_limits<double>::infinity();
    double mean = 0;
    double mean_size = 0;
    for (int64_t i = 0; i < c.vocab; ++i) {
      max[at] = std::max(max[at], logits.Get(row, i));
      mean += logits.Get(row, i) / vocab;
      mean_size += std::abs(logits.Get(row, i)) / vocab;
    }
    for (int64_t i = 0; i < c.vocab; ++i) {
      sum[at] += std::exp(logits.Get(row, i) - max[at]);
    }
    if (values[at] == kIgnore) continue;
    const double of_target = logits.Get(row, values[at]);
    lse[at] = std::log(sum[at]) + max[at];
    const double z = c.z_loss * lse[at] * lse[at];
    losses[at] = weights[at] * ((1 - smoothing) * (lse[at] - of_target) +
                                smoothing * (lse[at] - mean) + z);
    sizes[at] =
        weights[at] *
        (std::log(sum[at]) + max[at] - of_target + 1 + std::abs(max[at]) +
         smoothing * (mean_size + std::abs(of_target)) + 2 * z);
    loss += losses[at] / count;
    loss_size += sizes[at] / count;
    z_loss += weights[at] * z / count;
  }

  double loss64 = 0;
  float loss32 = 0;
  double z_part = 0;
  std::vector<double> row_losses(values.size());
  const bool f64 = loss_type == DType::kF64;
  Array& gradient = c.in_place ? logits : dlogits;
  Array given(dtype, c.positions, c.vocab);
  for (int64_t row = 0; row < c.positions; ++row) {
    for (int64_t i = 0; i < c.vocab; ++i) {
      given.SetExactly(row, i, logits.Get(row, i));
    }
  }
  CrossEntropyArgs args;
  args.logits = logits.view();
  args.targets = targets.view();
  if (c.given_count) args.count = static_cast<int64_t>(count);
  args.loss = Vector(f64 ? static_cast<void*>(&loss64) : &loss32, loss_type, 1);
  args.accumulate_loss = c.accumulate;
  args.dlogits = gradient.view();
  args.label_smoothing = c.label_smoothing;
  args.z_loss = c.z_loss;
  if (c.weighted)
    args.weights = Vector(weights.data(), DType::kF64, c.positions);
  args.losses = Vector(row_losses.data(), DType::kF64, c.positions);
  args.z_loss_part = Vector(&z_part, DType::kF64, 1);
  // At most 256 terms a lane, 64 lanes' sums and the error of exp.
  const double terms = static_cast<double>(std::min<int64_t>(c.vocab, 320)) + 8;
  OnAllTargets(
      [&](Context* context) {
        z_part = loss64 = loss32 = 0.75f;
        for (int64_t row = 0; row < c.positions; ++row) {
          for (int64_t i = 0; i < c.vocab; ++i) {
            logits.SetExactly(row, i, given.Get(row, i));
          }
        }
        ExpectOk(CrossEntropy(args, context));
        std::vector<uint8_t> all = gradient.bytes();
        const auto* bytes = reinterpret_cast<const uint8_t*>(&loss64);
        all.insert(all.end(), bytes, bytes + sizeof loss64);
        bytes = reinterpret_cast<const uint8_t*>(&loss32);
        all.insert(all.end(), bytes, bytes + sizeof loss32);
        bytes = reinterpret_cast<const uint8_t*>(row_losses.data());
        all.insert(all.end(), bytes,
                   bytes + row_losses.size() * sizeof(double));
        return all;
      },
      [&] {
        EXPECT_NEAR(f64 ? loss64 : static_cast<double>(loss32), loss,
                    Eps(f64 ? dtype : DType::kF32) * terms * loss_size);
        EXPECT_NEAR(z_part, z_loss, Eps(dtype) * terms * (1 + z_loss));
        for (size_t i = 0; i < losses.size(); ++i) {
          ASSERT_NEAR(row_losses[i], losses[i], Eps(dtype) * terms * sizes[i])
              << i;
        }
        const auto p = [&](int64_t row, int64_t i) {
          const auto at = static_cast<size_t>(row);
          return values[at] == kIgnore
                     ? 0.0
                     : weights[at] * (1 + 2 * c.z_loss * lse[at]) *
                           std::exp(given.Get(row, i) - max[at]) / sum[at] /
                           count;
        };
        ExpectNear(
            "dlogits", gradient,
            [&](int64_t row, int64_t i) {
              const auto at = static_cast<size_t>(row);
              if (values[at] == kIgnore) return 0.0;
              const double learned =
                  (values[at] == i ? 1 - smoothing : 0.0) + smoothing / vocab;
              return p(row, i) - weights[at] * learned / count;
            },
            [&](int64_t row, int64_t i) {
              return Eps(dtype) * (std::abs(p(row, i)) *
                                       (terms + max[static_cast<size_t>(row)] -
                                        given.Get(row, i)) +
                                   2 * smoothing / vocab) +
                     // The oracle's own roundings.
                     0x1p-51 * weights[static_cast<size_t>(row)] / count;
            });
        EXPECT_TRUE(gradient.PaddingIntact());
      });
}

TEST_P(IndexedOps, CrossEntropy) {
  for (const auto& [positions, vocab] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 3},
                                                {1, 1},
                                                {7, 2},
                                                {5, 17},
                                                {64, 31},
                                                {33, 64},
                                                {129, 129},
                                                {3, 2048},
                                                {4, 2049},
                                                {6, 10007}}) {
    TestCrossEntropy(GetParam(), DType::kF32, {positions, vocab, false, true});
    TestCrossEntropy(GetParam(), DType::kF64, {positions, vocab, true, false});
    TestCrossEntropy(GetParam(), DType::kF64,
                     {positions, vocab, false, true, 0.1, 1e-3, true, true});
    TestCrossEntropy(GetParam(), DType::kF64,
                     {positions, vocab, true, false, 0.3, 0.0, true, false});
  }
}

TEST_P(IndexedOps, CrossEntropyOfLargeLogits) {
  // Logits of 1e4 neither overflow nor lose the row.
  const int64_t vocab = 300;
  Array logits(GetParam(), 2, vocab), dlogits(GetParam(), 2, vocab);
  logits.Fill(Normal(8));
  logits.Set(0, 3, 1e4f);
  logits.Set(1, 4, -1e4f);
  const Ids targets(DType::kI32, {3, 4});
  double loss = 0;
  CrossEntropyArgs args;
  args.logits = logits.view();
  args.targets = targets.view();
  args.count = 1;
  args.loss = Vector(&loss, DType::kF64, 1);
  args.dlogits = dlogits.view();
  ExpectOk(CrossEntropy(args));
  double sum = 0;
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(logits.Get(1, i));
  EXPECT_NEAR(loss, std::log(sum) - logits.Get(1, 4), 1e4 * Eps(GetParam()));
  EXPECT_EQ(dlogits.Get(0, 3), 0.0);
  EXPECT_EQ(dlogits.Get(1, 4), -1.0);
}

TEST_P(IndexedOps, CrossEntropyNanAndCounts) {
  for (const std::string& target : Targets()) {
    SCOPED_TRACE(target);
    const auto context = MakeContext(target, 2);
    Array logits(GetParam(), 4, 19), dlogits(GetParam(), 4, 19);
    logits.Fill(Normal(9));
    logits.Set(1, 18, kNan);
    // NaN in an ignored row is seen by nobody.
    logits.Set(2, 0, kNan);
    const Ids targets(DType::kI64, {0, 1, 7, 3});
    float loss = 0.5f;
    CrossEntropyArgs args;
    args.logits = logits.view();
    args.targets = targets.view();
    args.ignore_index = 7;
    args.loss = Vector(&loss, DType::kF32, 1);
    args.dlogits = dlogits.view();
    ExpectOk(CrossEntropy(args, context.get()));
    EXPECT_TRUE(std::isnan(loss));
    for (int64_t row = 0; row < 4; ++row) {
      for (int64_t i = 0; i < 19; ++i) {
        ASSERT_EQ(std::isnan(dlogits.Get(row, i)), row == 1) << row;
        if (row == 2) {
          ASSERT_EQ(dlogits.Get(row, i), 0.0);
        }
      }
    }
    // A count of 0 does nothing at all.
    const std::vector<uint8_t> before = dlogits.bytes();
    loss = 0.5f;
    args.count = 0;
    ExpectOk(CrossEntropy(args, context.get()));
    EXPECT_EQ(loss, 0.5f);
    EXPECT_EQ(dlogits.bytes(), before);
    // Nothing but ignored positions: a loss of 0 and gradients of 0.
    const Ids ignored(DType::kI64, {7, 7, 7, 7});
    args.targets = ignored.view();
    args.count.reset();
    ExpectOk(CrossEntropy(args, context.get()));
    EXPECT_EQ(loss, 0.0f);
    for (int64_t row = 0; row < 4; ++row) {
      for (int64_t i = 0; i < 19; ++i) ASSERT_EQ(dlogits.Get(row, i), 0.0);
    }
    // Either output alone.
    args.targets = targets.view();
    args.loss = {};
    ExpectOk(CrossEntropy(args, context.get()));
    EXPECT_EQ(dlogits.bytes(), before);
    args.dlogits = {};
    ExpectOk(CrossEntropy(args, context.get()));
  }
}

}  // namespace
}  // namespace fa2::test
