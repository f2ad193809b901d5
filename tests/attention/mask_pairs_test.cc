// SPDX-License-Identifier: Apache-2.0

// What plans share the work out by: every pair of a block that is seen counts.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "fa2/attention.h"
#include "src/attention/call/mask.h"

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

}  // namespace
}  // namespace fa2::attention
