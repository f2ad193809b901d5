// SPDX-License-Identifier: Apache-2.0

// Bitwise block-invariant engines: a block gives the bits that its parts would
// give in turn, however it is cut. On this rests that results do not depend on
// the number of threads, by which blocks are cut.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "src/simd/amx/engine.h"
#include "tests/simd/amx_emulated.h"
#include "tests/simd/block_arrays.h"
#include "tests/simd/key_rows.h"

namespace fa2::simd {
namespace {

struct JoinCase {
  int64_t depth;
  int64_t value_depth;
  int64_t queries;
  int64_t keys;
  bool causal;  // key <= query + keys - queries

  std::string Name() const {
    return "head dims " + std::to_string(depth) + " and " +
           std::to_string(value_depth) + ", " + std::to_string(queries) +
           " queries, " + std::to_string(keys) + " keys" +
           (causal ? ", causal" : "");
  }
};

// Sizes of consecutive blocks.
using Cuts = std::vector<int64_t>;

// dQ, dK and dV, or out with what belongs to it, as rows.
using Results = std::vector<std::vector<float>>;

class JoinProblem {
 public:
  JoinProblem(const Engine& engine, DType dtype, const JoinCase& c)
      : e_(engine),
        c_(c),
        q_(c.queries, c.depth, dtype),
        k_(c.keys, c.depth, dtype),
        v_(c.keys, c.value_depth, dtype),
        dout_(c.queries, c.value_depth, dtype),
        lse_(c.queries),
        delta_(c.queries) {
    std::mt19937 random(3);
    for (Tensor* t : {&q_, &k_, &v_, &dout_}) t->Fill(random, 1.0);
    std::normal_distribution<float> normal;
    for (float& x : lse_) x = 3.0f + normal(random);
    for (float& x : delta_) x = normal(random);
  }

  Results Backward(const Cuts& query_cuts, const Cuts& key_cuts) const {
    const Bytes dq(e_.query_accumulator_bytes(c_.queries, c_.depth));
    const Bytes dk(e_.key_accumulator_bytes(c_.keys, c_.depth));
    const Bytes dv(e_.key_accumulator_bytes(c_.keys, c_.value_depth));
    const Bytes scratch(e_.backward_scratch_bytes(
        {Largest(key_cuts), Largest(query_cuts)}, c_.depth, c_.value_depth));
    int64_t k0 = 0;
    for (const int64_t keys : key_cuts) {
      const Bytes k_score = Pack(Role::kScoreLeft, k_, k0, keys);
      const Bytes v_score = Pack(Role::kScoreLeft, v_, k0, keys);
      const Bytes k_grad = Pack(Role::kGradLeft, k_, k0, keys);
      int64_t q0 = 0;
      for (const int64_t queries : query_cuts) {
        const Bytes q_score = Pack(Role::kScoreRight, q_, q0, queries);
        const Bytes q_grad = Pack(Role::kGradRight, q_, q0, queries);
        const Bytes dout_score = Pack(Role::kScoreRight, dout_, q0, queries);
        const Bytes dout_grad = Pack(Role::kGradRight, dout_, q0, queries);
        BackwardBlock block;
        Visibility seen(*this, q0, queries, k0, keys);
        seen.Describe(block);
        block.scratch = scratch.get();
        block.k_score = k_score.get();
        block.v_score = v_score.get();
        block.k_grad = k_grad.get();
        block.q_score = q_score.get();
        block.q_grad = q_grad.get();
        block.dout_score = dout_score.get();
        block.dout_grad = dout_grad.get();
        block.lse = lse_.data() + q0;
        block.delta = delta_.data() + q0;
        block.dq = dq.get() + e_.query_accumulator_bytes(q0, c_.depth);
        block.dk = dk.get() + e_.key_accumulator_bytes(k0, c_.depth);
        block.dv = dv.get() + e_.key_accumulator_bytes(k0, c_.value_depth);
        block.add_to_dq = k0 > 0;
        block.add_to_dk = block.add_to_dv = q0 > 0;
        e_.backward(block);
        q0 += queries;
      }
      k0 += keys;
    }
    Results results(3);
    results[0].resize(c_.queries * c_.depth);
    results[1].resize(c_.keys * c_.depth);
    results[2].resize(c_.keys * c_.value_depth);
    e_.unpack_query_rows(dq.get(), c_.queries, c_.depth, 0, c_.queries,
                         results[0].data(), c_.depth);
    KeyRows(e_, dk.get(), c_.keys, c_.depth, c_.keys, results[1].data());
    KeyRows(e_, dv.get(), c_.keys, c_.value_depth, c_.keys, results[2].data());
    return results;
  }

  // Queries alone may be cut at will.
  Results Forward(const Cuts& query_cuts, const Cuts& key_cuts) const {
    const float lowest = -static_cast<float>(kInfinity);
    Array<float> max(c_.queries, lowest), sum(c_.queries), weight(c_.queries);
    const Bytes out(e_.query_accumulator_bytes(c_.queries, c_.value_depth));
    const Bytes scratch(e_.forward_scratch_bytes(
        {Largest(key_cuts), Largest(query_cuts)}, c_.depth, c_.value_depth));
    int64_t q0 = 0;
    for (const int64_t queries : query_cuts) {
      const Bytes q_score = Pack(Role::kScoreRight, q_, q0, queries);
      int64_t k0 = 0;
      for (const int64_t keys : key_cuts) {
        const Bytes k_score = Pack(Role::kScoreLeft, k_, k0, keys);
        const Bytes v_grad = Pack(Role::kGradLeft, v_, k0, keys);
        ForwardBlock block;
        Visibility seen(*this, q0, queries, k0, keys);
        seen.Describe(block);
        block.scratch = scratch.get();
        block.q_score = q_score.get();
        block.k_score = k_score.get();
        block.v_grad = v_grad.get();
        block.row_max = max.data() + q0;
        block.row_sum = sum.data() + q0;
        if (e_.rounds_probabilities) block.row_weight = weight.data() + q0;
        block.out = out.get() + e_.query_accumulator_bytes(q0, c_.value_depth);
        block.first = k0 == 0;
        e_.forward(block);
        k0 += keys;
      }
      q0 += queries;
    }
    Results results(1);
    results[0].resize(c_.queries * c_.value_depth);
    e_.unpack_query_rows(out.get(), c_.queries, c_.value_depth, 0, c_.queries,
                         results[0].data(), c_.value_depth);
    for (const auto& rows : {max, sum, weight}) {
      results.emplace_back(rows.begin(), rows.end());
    }
    return results;
  }

 private:
  // What queries [q0, q0 + queries) see of keys [k0, k0 + keys).
  class Visibility {
   public:
    Visibility(const JoinProblem& p, int64_t q0, int64_t queries, int64_t k0,
               int64_t keys)
        : p_(p),
          queries_(queries),
          keys_(keys),
          stride_(queries / kTileQueries) {
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t end =
            p.c_.causal ? q0 + i + p.c_.keys - p.c_.queries + 1 - k0 : keys;
        begin_.push_back(0.0f);
        end_.push_back(static_cast<float>(std::clamp<int64_t>(end, 0, keys)));
      }
      for (int64_t k = 0; k < keys; k += kTileKeys) {
        for (int64_t q = 0; q < queries; q += kTileQueries) {
          const float least = end_[q], most = end_[q + kTileQueries - 1];
          tiles_.push_back(
              static_cast<float>(k + kTileKeys) <= least ? TileState::kVisible
              : static_cast<float>(k) >= most            ? TileState::kHidden
                                                         : TileState::kPartial);
        }
      }
    }
    void Describe(Block& block) const {
      block.keys = keys_;
      block.queries = queries_;
      block.head_dim = p_.c_.depth;
      block.value_dim = p_.c_.value_depth;
      block.score.scale = 0.125;
      if (!p_.c_.causal) return;
      block.tiles = tiles_.data();
      block.tile_stride = stride_;
      block.score.visible_begin = begin_.data();
      block.score.visible_end = end_.data();
    }

   private:
    const JoinProblem& p_;
    int64_t queries_, keys_, stride_;
    Array<float> begin_, end_;
    std::vector<TileState> tiles_;
  };

  static int64_t Largest(const Cuts& cuts) {
    return *std::max_element(cuts.begin(), cuts.end());
  }

  Bytes Pack(Role role, const Tensor& t, int64_t first, int64_t count) const {
    Rows rows = t.View();
    rows.data = static_cast<const char*>(rows.data) +
                first * rows.stride * static_cast<int64_t>(SizeOf(rows.dtype));
    rows.rows = count;
    Bytes packed(e_.packed_bytes(role, count, rows.depth));
    e_.pack(role, rows, count, false, packed.get());
    return packed;
  }

  const Engine& e_;
  const JoinCase c_;
  Tensor q_, k_, v_, dout_;
  Array<float> lse_, delta_;
};

void ExpectSame(const Results& whole, const Results& parts,
                const std::vector<const char*>& names) {
  ASSERT_EQ(whole.size(), names.size());
  for (size_t r = 0; r < whole.size(); ++r) {
    ASSERT_EQ(whole[r].size(), parts[r].size());
    int64_t different = 0;
    for (size_t i = 0; i < whole[r].size(); ++i) {
      different += std::memcmp(&whole[r][i], &parts[r][i], sizeof(float)) != 0;
    }
    EXPECT_EQ(different, 0) << names[r];
  }
}

struct Subject {
  std::string name;
  AmxTerms terms;
  DType dtype;
};

class JoinTest : public testing::TestWithParam<Subject> {
 protected:
  // On emulated tiles and, where there are any, those of the hardware.
  static void ForEngines(const std::function<void(const Engine&)>& check) {
    int engines = 0;
    for (const auto engine_of : {&EmulatedAmxEngine, &AmxEngine}) {
      const Engine* const engine = engine_of(GetParam().terms);
      if (engine == nullptr) continue;
      ++engines;
      EXPECT_TRUE(engine->bitwise_block_invariant);
      check(*engine);
    }
    if (engines == 0) GTEST_SKIP() << "no AVX-512 here";
  }
};

// Head dims of every kind of loop: 2, 4 and 8 steps, others, unequal ones.
std::vector<JoinCase> Cases() {
  std::vector<JoinCase> cases;
  for (const auto& [depth, value_depth] : {std::pair<int64_t, int64_t>{64, 64},
                                           {128, 128},
                                           {256, 256},
                                           {72, 72},
                                           {128, 64}}) {
    for (const bool causal : {false, true}) {
      cases.push_back({depth, value_depth, 320, 192, causal});
    }
  }
  return cases;
}

TEST_P(JoinTest, Backward) {
  ForEngines([](const Engine& engine) {
    for (const JoinCase& c : Cases()) {
      SCOPED_TRACE(c.Name());
      const JoinProblem problem(engine, GetParam().dtype, c);
      const Results whole = problem.Backward({320}, {192});
      for (const Cuts& queries : {Cuts{320}, {96, 224}, {32, 160, 128}}) {
        for (const Cuts& keys : {Cuts{192}, {64, 128}, {96, 32, 64}}) {
          ExpectSame(whole, problem.Backward(queries, keys),
                     {"dQ", "dK", "dV"});
        }
      }
    }
  });
}

TEST_P(JoinTest, Forward) {
  ForEngines([](const Engine& engine) {
    for (const JoinCase& c : Cases()) {
      SCOPED_TRACE(c.Name());
      const JoinProblem problem(engine, GetParam().dtype, c);
      const Cuts keys = {128, 64};
      const Results whole = problem.Forward({320}, keys);
      for (const Cuts& queries : {Cuts{96, 224}, {32, 160, 128}}) {
        ExpectSame(whole, problem.Forward(queries, keys),
                   {"out", "maxima", "sums", "weights"});
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, JoinTest,
    testing::Values(Subject{"bf16", AmxTerms::kBf16, DType::kBF16},
                    Subject{"few_keys", AmxTerms::kBf16FewKeys, DType::kBF16},
                    Subject{"exact", AmxTerms::kBf16Exact, DType::kBF16},
                    Subject{"f16", AmxTerms::kF16, DType::kF16},
                    Subject{"f16_exact", AmxTerms::kF16Exact, DType::kF16},
                    Subject{"f32_high", AmxTerms::kF32High, DType::kF32},
                    Subject{"f32", AmxTerms::kF32, DType::kF32}),
    [](const testing::TestParamInfo<Subject>& info) {
      return info.param.name;
    });

}  // namespace
}  // namespace fa2::simd
