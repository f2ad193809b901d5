// SPDX-License-Identifier: Apache-2.0

// Scores so large that one key takes all of a row's probability: out is that
// key's v, lse its score, and dV what the rows that chose it bring. A score
// that has been rounded in one place and not in another would be off by
// hundreds, whose exponential is 0 or infinite.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"

namespace fa2::test {
namespace {

// Key j is key_size * Rank(j) in all dimensions, exact in each float type; no
// two keys share a rank.
constexpr int64_t kKeys = 131;
int64_t Rank(int64_t key) { return (key * 37 + 11) % kKeys - 50; }

// Row i wants the greatest key that it sees, or the least.
double Sign(int64_t query) { return query % 3 == 0 ? -1.0 : 1.0; }

int64_t Winner(const AttentionCase& c, int64_t query) {
  int64_t winner = 0;
  const int64_t last = c.causal == Causal::kTopLeft ? query : c.nk - 1;
  for (int64_t key = 1; key <= last; ++key) {
    if (Sign(query) * static_cast<double>(Rank(key) - Rank(winner)) > 0.0) {
      winner = key;
    }
  }
  return winner;
}

void ExpectOneKeyARow(const AttentionCase& c, double largest_score,
                      Context* context) {
  SCOPED_TRACE(Describe(c) + " scores of " + std::to_string(largest_score));
  const double scale = c.scale.value_or(1.0 / std::sqrt(double(c.head_dim)));
  // A power of two for each, so that products are exact.
  const double size = std::exp2(std::floor(std::log2(
      std::sqrt(largest_score / (80.0 * scale * double(c.head_dim))))));
  const AttentionInputs inputs = MakeInputs(c, [&](AttentionInputs* in) {
    ForEachIndex(in->q.view.sizes, [&](const Sizes& at) {
      Set(in->q.view, at, size * Sign(at[2]));
    });
    ForEachIndex(in->k.view.sizes, [&](const Sizes& at) {
      Set(in->k.view, at, size * double(Rank(at[2])));
    });
  });
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  Status status = AttentionForward(ForwardArgs(inputs, outputs), context);
  ASSERT_TRUE(status.ok()) << status.message();
  AttentionInputs given = inputs;
  given.out = outputs.out;
  given.lse = outputs.lse;
  status = AttentionBackward(BackwardArgs(c, given, outputs), context);
  ASSERT_TRUE(status.ok()) << status.message();

  const bool narrow = c.dtype == DType::kBF16 || c.dtype == DType::kF16;
  // On a matrix unit f32 is two or three terms of bf16.
  const double unit = narrow                            ? 0x1p-8
                      : c.dtype == DType::kF64          ? 0x1p-52
                      : c.precision == Precision::kHigh ? 0x1p-15
                                                        : 0x1p-18;
  const double lse_unit = c.dtype == DType::kF64            ? 0x1p-50
                          : c.precision == Precision::kHigh ? 0x1p-15
                                                            : 0x1p-18;
  // What other keys are left with.
  const double rest = std::exp(-scale * size * size * double(c.head_dim));
  // P = exp(S - lse) is off by what lse was rounded by, until scores are
  // rounded as lse is.
  const double lse_rounding = c.dtype != DType::kF64 && largest_score < 2e4
                                  ? largest_score * 0x1p-24
                                  : 0.0;
  // No element of v is larger.
  const double rest_of_out = 6.0 * rest * kKeys;
  for (int64_t i = 0; i < c.nq; ++i) {
    const int64_t winner = Winner(c, i);
    const double score = scale * size * size * double(c.head_dim) * Sign(i) *
                         double(Rank(winner));
    EXPECT_NEAR(Get(outputs.lse.view, {0, 0, i, 0}), score,
                lse_unit * std::abs(score) + 2.0 * rest + 1e-12)
        << "row " << i;
    for (int64_t d = 0; d < c.value_dim; ++d) {
      const double v = Get(inputs.v.view, {0, 0, winner, d});
      ASSERT_NEAR(Get(outputs.out.view, {0, 0, i, d}), v,
                  unit * std::abs(v) + rest_of_out)
          << "row " << i << " column " << d;
    }
  }
  for (int64_t d = 0; d < c.value_dim; ++d) {
    std::vector<double> sum(kKeys), size_of_terms(kKeys);
    double all = 0.0;
    for (int64_t i = 0; i < c.nq; ++i) {
      const double g = Get(inputs.dout.view, {0, 0, i, d});
      sum[Winner(c, i)] += g;
      size_of_terms[Winner(c, i)] += std::abs(g);
      all += std::abs(g);
    }
    for (int64_t j = 0; j < c.nk; ++j) {
      ASSERT_NEAR(Get(outputs.dv.view, {0, 0, j, d}), sum[j],
                  (2.0 * unit + lse_rounding) * size_of_terms[j] + rest * all)
          << "dv, key " << j << " column " << d;
    }
  }
  // dS is 0 but for the rounding of delta, whose terms are D products of dout
  // and v: dQ and dK are as small beside the keys and queries.
  for (const Tensor* t : {&outputs.dq, &outputs.dk}) {
    ForEachIndex(t->view.sizes, [&](const Sizes& at) {
      const double bound = 0x1p-12 * scale * size * 80.0 * double(c.value_dim) *
                           double(c.nq) * 16.0;
      ASSERT_LE(std::abs(Get(t->view, at)), bound);
    });
  }
}

TEST(AttentionLargeScores, OneKeyTakesARow) {
  const Contexts contexts({1, 3});
  for (const DType dtype :
       {DType::kBF16, DType::kF32, DType::kF16, DType::kF64}) {
    for (const Precision precision : {Precision::kFast, Precision::kHigh}) {
      if (precision == Precision::kHigh && dtype != DType::kF32) continue;
      for (const double score : {3e3, 1e5, 1e7, 1e10, 1e20, 1e36}) {
        // Keys of 80 times a power of two must be finite.
        if (dtype == DType::kF16 && score > 1e8) continue;
        for (const bool causal : {false, true}) {
          for (const int64_t dim : {40, 64, 128}) {
            AttentionCase c;
            c.dtype = dtype;
            c.precision = precision;
            c.nq = c.nk = kKeys;
            c.head_dim = c.value_dim = dim;
            c.causal = causal ? Causal::kTopLeft : Causal::kNone;
            // Not a power of two.
            if (dim == 128) c.scale = 0.3;
            ExpectOneKeyARow(c, score, contexts.list()[causal ? 1 : 0]);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fa2::test
