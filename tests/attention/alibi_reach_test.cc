// SPDX-License-Identifier: Apache-2.0

// Which tiles ALiBi leaves out: none that holds a probability, and most of
// those that do not.
#include "src/attention/scores/alibi_reach.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "fa2/attention.h"
#include "src/simd/target.h"
#include "tests/support/buffer.h"

namespace fa2::attention {
namespace {

constexpr int64_t kDim = 32;
// Exponentials of less are 0.
constexpr double kLowest = -100.0 * 0.6931471805599453;

// One sequence of two query heads that share their keys, of f32.
struct Attention {
  Attention(int64_t queries, int64_t keys, std::vector<float> slopes,
            AttentionOptions given = {})
      : nq(queries),
        nk(keys),
        slope(std::move(slopes)),
        q(static_cast<size_t>(2 * nq * kDim)),
        k(static_cast<size_t>(nk * kDim)) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (std::vector<float>* x : {&q, &k}) {
      for (float& e : *x) e = normal(random);
    }
    problem.options = given;
    problem.options.alibi_slopes = {
        slope.data(), DType::kF32, {1, 2, 1, 1}, {2, 1, 1, 1}};
    problem.q_heads = 2;
    problem.kv_heads = 1;
    problem.head_dim = problem.value_dim = kDim;
    problem.scale = 1.0 / std::sqrt(static_cast<double>(kDim));
    problem.q = {q.data(),
                 DType::kF32,
                 {1, 2, nq, kDim},
                 {2 * nq * kDim, nq * kDim, kDim, 1}};
    problem.k = {k.data(),
                 DType::kF32,
                 {1, 1, nk, kDim},
                 {nk * kDim, nk * kDim, kDim, 1}};
    Sequence sequence;
    sequence.mask = Mask(problem.options, nq, nk);
    problem.sequences.push_back(sequence);
  }

  double Score(int64_t head, int64_t i, int64_t j) const {
    double sum = 0.0;
    for (int64_t d = 0; d < kDim; ++d) {
      sum += static_cast<double>(q[(head * nq + i) * kDim + d]) *
             static_cast<double>(k[j * kDim + d]);
    }
    return problem.scale * sum -
           static_cast<double>(slope[head]) *
               static_cast<double>(std::abs(i + nk - nq - j));
  }

  double LogSumExp(int64_t head, int64_t i) const {
    const Interval keys = problem.sequences[0].mask.Keys(i);
    double sum = 0.0;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      sum += std::exp(Score(head, i, j));
    }
    return std::log(sum);
  }

  // The greatest logarithm of a probability in the tile.
  double Greatest(int64_t head, int64_t q0, int64_t k0) const {
    double most = -HUGE_VAL;
    for (int64_t i = q0; i < std::min(q0 + simd::kTileQueries, nq); ++i) {
      const Interval keys = problem.sequences[0].mask.Keys(i);
      for (int64_t j = std::max(k0, keys.begin);
           j < std::min(k0 + simd::kTileKeys, keys.end); ++j) {
        most = std::max(most, Score(head, i, j) - LogSumExp(head, i));
      }
    }
    return most;
  }

  const int64_t nq, nk;
  std::vector<float> slope;
  std::vector<float> q, k;  // [head][row][kDim]
  Problem problem;
};

class Reach {
 public:
  // Bounded by the statistics where they are given.
  explicit Reach(const Attention& attention, bool statistics = false,
                 float delta_of_40 = 0.5f)
      : attention_(attention) {
    const simd::RowKernels& kernels =
        *simd::RowKernelsFor(DType::kF32, simd::AvailableTargets());
    threading::ScratchLayout sizes(nullptr);
    AlibiReach(attention.problem, kernels, &sizes);
    memory_.resize(sizes.used() + 64);
    threading::ScratchLayout layout(memory_.data());
    reach_ = std::make_unique<AlibiReach>(attention.problem, kernels, &layout);
    const Problem& p = attention.problem;
    // In blocks of 96, as a plan might have them.
    for (int64_t at = 0; at < attention.nk; at += 96) {
      const BlockRows keys = {0, 0, {at, std::min(at + 96, attention.nk)}};
      reach_->SeeKeys(keys, RowsOf(p.k, {0, 0, at, keys.size()}));
    }
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t at = 0; at < attention.nq; at += 96) {
        const BlockRows queries = {0, h, {at, std::min(at + 96, attention.nq)}};
        reach_->SeeQueries(queries, RowsOf(p.q, {0, h, at, queries.size()}));
        if (!statistics) {
          const Interval own = reach_->OwnKeys(queries);
          reach_->BoundByNearestKey(queries,
                                    RowsOf(p.q, {0, h, at, queries.size()}),
                                    RowsOf(p.k, {0, 0, own.begin, own.size()}));
          continue;
        }
        std::vector<float> lse, delta;
        for (int64_t i = at; i < queries.rows.end; ++i) {
          lse.push_back(static_cast<float>(attention.LogSumExp(h, i)));
          delta.push_back(i == 40 ? delta_of_40 : 0.5f);
        }
        reach_->BoundByStatistics(queries, lse.data(), delta.data());
      }
    }
  }

  Interval OwnKeys(const BlockRows& queries) const {
    return reach_->OwnKeys(queries);
  }

  bool Hides(int64_t head, int64_t q, int64_t k) const {
    const Interval queries{q, std::min(q + simd::kTileQueries, attention_.nq)};
    const Interval keys{k, std::min(k + simd::kTileKeys, attention_.nk)};
    return reach_->MayHide({{0, head, queries}, {0, 0, keys}}) &&
           reach_->Hides(0, head, q, k);
  }

 private:
  const Attention& attention_;
  std::vector<std::byte> memory_;
  std::unique_ptr<AlibiReach> reach_;
};

// Calls visit(query, key) for all tiles.
template <class Visit>
void ForTiles(const Attention& a, const Visit& visit) {
  for (int64_t q = 0; q < a.nq; q += simd::kTileQueries) {
    for (int64_t k = 0; k < a.nk; k += simd::kTileKeys) visit(q, k);
  }
}

// Nothing that counts is hidden, and all that is `beyond` keys away is.
void ExpectReach(const Attention& a, const Reach& reach, int64_t beyond) {
  ForTiles(a, [&](int64_t q, int64_t k) {
    EXPECT_FALSE(reach.Hides(1, q, k)) << q << " " << k;
    const int64_t position = q + a.nk - a.nq;
    const bool far = k - (position + simd::kTileQueries) > beyond ||
                     position - (k + simd::kTileKeys) > beyond;
    if (reach.Hides(0, q, k)) {
      EXPECT_LT(a.Greatest(0, q, k), kLowest) << q << " " << k;
    } else {
      EXPECT_FALSE(far) << q << " " << k;
    }
  });
}

const std::vector<float> kSlopes = {1.0f, 0.01f};

TEST(AlibiReach, HidesWhatCountsForNothing) {
  const Attention full(300, 300, kSlopes);
  // 70 of exponentials and scores of at most some 8.
  ExpectReach(full, Reach(full), 88);
  ExpectReach(full, Reach(full, true), 85);
  AttentionOptions causal;
  causal.causal = Causal::kTopLeft;
  const Attention shifted(200, 300, kSlopes, causal);
  // The nearest key that query i sees is 100 away, and is bounded by norms.
  ExpectReach(shifted, Reach(shifted), 195);
  ExpectReach(shifted, Reach(shifted, true), 185);
}

TEST(AlibiReach, WhatScoresOutweighIsSeen) {
  Attention a(300, 300, kSlopes);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 0; i < a.nq; ++i) a.q[(h * a.nq + i) * kDim] = 5.0f;
  }
  a.k[2 * kDim] = 400.0f;
  ExpectReach(a, Reach(a), 1000);
  ExpectReach(a, Reach(a, true), 1000);
}

// Those of a row or key that holds such a number, and only those.
TEST(AlibiReach, WhatIsNotFiniteIsSeen) {
  Attention a(300, 300, kSlopes);
  const auto expect = [&](const Reach& reach, int64_t query, int64_t key) {
    ForTiles(a, [&](int64_t q, int64_t k) {
      if (q == query || k == key) {
        EXPECT_FALSE(reach.Hides(0, q, k)) << q << " " << k;
      }
    });
    EXPECT_TRUE(reach.Hides(0, 0, 160));
  };
  const float inf = std::numeric_limits<float>::infinity();
  for (const float value : {std::nanf(""), inf}) {
    expect(Reach(a, true, value), 32, -1);
  }
  for (const float value : {std::nanf(""), inf, 3e38f}) {
    const auto expect_with = [&](float* element, int64_t query, int64_t key) {
      const float before = std::exchange(*element, value);
      expect(Reach(a), query, key);
      *element = before;
    };
    expect_with(&a.k[250 * kDim + 3], -1, 240);
    expect_with(&a.q[50 * kDim + 3], 32, -1);
  }
}

TEST(AlibiReach, GentleSlopesHideNothing) {
  for (const float slope :
       {0.2f, 0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN()}) {
    const Attention a(300, 300, {slope, slope});
    const Reach reach(a);
    ForTiles(a, [&](int64_t q, int64_t k) {
      EXPECT_FALSE(reach.Hides(0, q, k)) << slope << " " << q << " " << k;
    });
  }
}

// The keys at the queries' own positions, which are counted from the last key.
TEST(AlibiReach, OwnKeysAreThoseOnTheDiagonal) {
  const auto own = [](const Attention& a, Interval rows) {
    const Reach reach(a);
    return reach.OwnKeys({0, 0, rows});
  };
  const auto expect = [&](const Attention& a, Interval rows, Interval keys) {
    const Interval found = own(a, rows);
    EXPECT_EQ(found.begin, keys.begin);
    EXPECT_EQ(found.end, keys.end);
  };
  expect(Attention(300, 300, kSlopes), {32, 96}, {32, 96});
  expect(Attention(200, 300, kSlopes), {32, 96}, {132, 196});
  expect(Attention(300, 200, kSlopes), {64, 192}, {0, 92});
  EXPECT_TRUE(own(Attention(300, 200, kSlopes), {0, 64}).empty());
  EXPECT_TRUE(own(Attention(300, 300, {0.0f, 1.0f}), {32, 96}).empty());
}

// A bias might raise any score. And what is taken must not follow from slopes.
TEST(AlibiReach, TakesNothingBesideABias) {
  const auto bytes = [](const Problem& problem) {
    threading::ScratchLayout layout(nullptr);
    AlibiReach(problem,
               *simd::RowKernelsFor(DType::kF32, simd::AvailableTargets()),
               &layout);
    return layout.used();
  };
  Attention a(300, 300, kSlopes);
  EXPECT_GT(bytes(a.problem), 0u);
  EXPECT_EQ(bytes(a.problem), bytes(Attention(300, 300, {0.0f, 0.0f}).problem));
  a.problem.options.bias = a.problem.q;
  EXPECT_EQ(bytes(a.problem), 0u);
}

// Of more sequences than heads, and the other way round: the arrays end where a
// page does.
TEST(AlibiReach, KeepsToWhatItTakes) {
  const test::PlacementOfBuffers placed(test::Placement::kEndsAtPage);
  const simd::RowKernels& kernels =
      *simd::RowKernelsFor(DType::kF32, simd::AvailableTargets());
  constexpr int64_t kRows = 2000;
  for (const int64_t batch : {1, 5}) {
    const int64_t heads = 6 - batch;
    const std::vector<float> slopes(static_cast<size_t>(heads), 1.0f);
    const std::vector<float> rows(static_cast<size_t>(kRows * kDim), 1.0f);
    Problem problem;
    problem.options.alibi_slopes = {
        slopes.data(), DType::kF32, {1, heads, 1, 1}, {heads, 1, 1, 1}};
    problem.q_heads = problem.kv_heads = heads;
    problem.head_dim = problem.value_dim = kDim;
    // All heads and sequences have the same rows.
    problem.q = {
        rows.data(), DType::kF32, {batch, heads, kRows, kDim}, {0, 0, kDim, 1}};
    problem.k = problem.q;
    for (int64_t b = 0; b < batch; ++b) {
      Sequence sequence;
      sequence.batch = b;
      sequence.mask = Mask(problem.options, kRows, kRows);
      problem.sequences.push_back(sequence);
    }
    threading::ScratchLayout sizes(nullptr);
    AlibiReach(problem, kernels, &sizes);
    test::Buffer memory(sizes.used());
    threading::ScratchLayout layout(
        reinterpret_cast<std::byte*>(memory.data()));
    const AlibiReach reach(problem, kernels, &layout);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        const BlockRows block = {b, h, {0, kRows}};
        const simd::Rows of_block = RowsOf(problem.k, {b, h, 0, kRows});
        reach.SeeKeys(block, of_block);
        reach.SeeQueries(block, of_block);
        reach.BoundByNearestKey(block, of_block, of_block);
      }
    }
    EXPECT_TRUE(reach.Hides(batch - 1, heads - 1, 0, 1984));
    EXPECT_FALSE(reach.Hides(batch - 1, heads - 1, 1984, 1984));
  }
}

}  // namespace
}  // namespace fa2::attention
