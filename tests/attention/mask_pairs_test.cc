// SPDX-License-Identifier: Apache-2.0

// What plans share the work out by: every pair of a block that is seen counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "fa2/attention.h"
#include "src/attention/call/mask.h"
#include "src/attention/call/problem.h"
#include "tests/support/attention_case.h"

namespace fa2::attention {
namespace {

TEST(Mask, PairsOfBlocks) {
  AttentionOptions causal, top_left, window, wide;
  causal.causal = Causal::kBottomRight;
  top_left.causal = Causal::kTopLeft;
  window.window_left = 7;
  window.window_right = 3;
  wide.window_left = 40;
  wide.causal = Causal::kBottomRight;
  for (const AttentionOptions& options :
       {AttentionOptions(), causal, top_left, window, wide}) {
    for (const auto& [nq, nk] : std::vector<std::pair<int64_t, int64_t>>{
             {50, 50}, {50, 20}, {20, 50}, {1, 50}, {0, 50}, {50, 0}}) {
      const Mask mask(options, nq, nk);
      int64_t all = 0;
      for (int64_t i = 0; i < nq; ++i) all += mask.Keys(i).size();
      EXPECT_EQ(mask.Pairs(), static_cast<double>(all));
      for (const Interval& queries :
           {Interval{0, nq / 3}, {nq / 3, nq}, {nq / 2, nq / 2}}) {
        for (const Interval& keys :
             {Interval{0, nk / 3}, {nk / 3, nk}, {nk / 2, nk / 2 + nk % 2}}) {
          int64_t pairs = 0;
          for (int64_t i = queries.begin; i < queries.end; ++i) {
            const Interval seen = mask.Keys(i);
            for (int64_t k = keys.begin; k < keys.end; ++k) {
              pairs += k >= seen.begin && k < seen.end;
            }
          }
          EXPECT_EQ(mask.Pairs(queries, keys), static_cast<double>(pairs))
              << nq << " x " << nk << ", queries from " << queries.begin
              << ", keys from " << keys.begin;
        }
      }
    }
  }
}

// A block is hidden or visible if all of its pairs are.
TEST(Mask, StatesOfBlocks) {
  AttentionOptions full, causal, window;
  causal.causal = Causal::kBottomRight;
  window.window_left = 9;
  window.window_right = 4;
  for (const AttentionOptions& options : {full, causal, window}) {
    for (const auto& [nq, nk] :
         std::vector<std::pair<int64_t, int64_t>>{{24, 24}, {24, 9}, {9, 24}}) {
      const Mask mask(options, nq, nk);
      for (int64_t q = 0; q < nq; ++q) {
        for (int64_t k = 0; k < nk; ++k) {
          for (const int64_t size : {1, 3, 8}) {
            const Interval rows = {q, std::min(q + size, nq)};
            const Interval keys = {k, std::min(k + size, nk)};
            const double in_range =
                static_cast<double>(rows.size() * keys.size());
            const double seen = mask.Pairs(rows, keys);
            EXPECT_EQ(mask.State({q, q + size}, keys),
                      seen == 0.0        ? simd::TileState::kHidden
                      : seen == in_range ? simd::TileState::kVisible
                                         : simd::TileState::kPartial)
                << nq << " x " << nk << ", " << size << " from " << q << ", "
                << k;
          }
        }
      }
    }
  }
}

// Packed sequences under lists of blocks, which are of all rows: the mean of
// the heads.
TEST(Problem, PairsOfListedBlocks) {
  for (const bool of_heads : {false, true}) {
    test::AttentionCase c;
    c.dtype = DType::kF32;
    c.heads = 2;
    c.kv_heads = 1;
    c.head_dim = c.value_dim = 4;
    c.lengths_q = {20, 50, 3};
    c.lengths_k = {40, 50, 17};
    c.causal = Causal::kBottomRight;
    c.block_size = {16, 16};
    c.block_broadcast = {true, !of_heads};
    c.blocks_partial = 0.4;
    c.blocks_full = 0.2;
    const test::AttentionInputs inputs = test::MakeInputs(c);
    const test::AttentionOutputs outputs = test::MakeOutputs(c, inputs);
    Problem problem;
    const Status status =
        CheckForward(test::ForwardArgs(inputs, outputs), &problem);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(problem.sequences.size(), 3u);
    EXPECT_EQ(problem.heads_differ(), of_heads);
    double all = 0.0;
    for (const Sequence& s : problem.sequences) {
      double pairs = 0.0;
      for (int64_t h = 0; h < 2; ++h) {
        double of_head = 0.0;
        for (int64_t i = 0; i < s.nq(); ++i) {
          const Interval seen = s.mask.Keys(i);
          for (int64_t k = seen.begin; k < seen.end; ++k) {
            of_head += problem.AnyListed(s, h, {i, i + 1}, {k, k + 1}) ? 1 : 0;
          }
        }
        EXPECT_EQ(problem.Pairs(s, {h, h + 1}, {0, s.nq()}, {0, s.nk()}),
                  of_head);
        pairs += of_head;
      }
      EXPECT_EQ(s.pairs, pairs / 2.0);
      all += s.pairs;
    }
    EXPECT_EQ(problem.pairs(), all);
    EXPECT_GT(all, 0.0);
  }
}

}  // namespace
}  // namespace fa2::attention
