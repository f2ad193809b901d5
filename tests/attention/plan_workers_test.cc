// SPDX-License-Identifier: Apache-2.0

// Plans: how heads, groups and calls are shared among threads.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "src/attention/schedule/backward_plan.h"
#include "src/attention/schedule/forward_plan.h"
#include "tests/attention/plan_cases.h"

namespace fa2::attention {
namespace {

// Heads are taken alone where each thread gets many of them, of much the same
// length.
TEST(Plan, HeadsAlone) {
  const auto alone = [](int64_t heads, const std::vector<int64_t>& lengths,
                        int threads, bool share_heads = false) {
    const Problem problem = ProblemOf(heads, lengths, false);
    BackwardUse use;
    use.threads = threads;
    use.share_heads = share_heads;
    BackwardPlan backward;
    PlanBackward(problem, EngineOf(true), use, &backward);
    ForwardPlan forward;
    PlanForward(problem, EngineOf(true), threads, &forward);
    if (!share_heads) {
      EXPECT_EQ(forward.head_batches.alone, backward.head_batches.alone);
    }
    return backward.head_batches.alone;
  };
  EXPECT_TRUE(alone(16, {512}, 2));
  EXPECT_FALSE(alone(16, {512}, 2, true));
  EXPECT_FALSE(alone(16, {512}, 16));
  EXPECT_TRUE(alone(17, {512}, 2));     // 9 and 8
  EXPECT_FALSE(alone(129, {512}, 16));  // 9 and 8, eight times as often
  EXPECT_TRUE(alone(16, std::vector<int64_t>(16, 256), 16));
  EXPECT_FALSE(alone(1, {8192, 64, 64, 64, 64, 64, 64, 64, 64}, 2));
  EXPECT_FALSE(alone(16, {0}, 2));
}

// Heads that share their keys: several threads work through splits of their
// group, whatever its size; and where their queries are many one worker passes
// the keys by them. The workspace of a head batch holds all keys then.
TEST(Plan, GroupedHeads) {
  const auto plan_of = [](int64_t group, int64_t rows, int threads,
                          bool share_heads = false, int64_t kv_heads = 4,
                          bool invariant = true) {
    const Problem problem = ProblemOf({kv_heads, rows, rows, 64, false, group});
    BackwardUse use;
    use.threads = threads;
    use.share_heads = share_heads;
    BackwardPlan plan;
    PlanBackward(problem, EngineOf(invariant), use, &plan);
    EXPECT_EQ(plan.keys_in_batch,
              plan.order != LoopOrder::kKeyOuter || share_heads);
    if (plan.head_batches.threads(threads) > 1) {
      EXPECT_EQ(plan.order, plan.group_splits > 1
                                ? LoopOrder::kKeyOuterGroupSplit
                                : LoopOrder::kKeyOuter);
    }
    // Each query head is in one split of one kv head.
    int64_t heads = 0;
    for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      for (int64_t g = 0; g < plan.group_splits; ++g) {
        const Interval of_split = plan.GroupSplitHeads(kv_head, g);
        EXPECT_EQ(of_split.begin, heads);
        EXPECT_FALSE(of_split.empty());
        heads = of_split.end;
      }
    }
    EXPECT_EQ(heads, kv_heads * group);
    // A task for each split, or for all of a kv head.
    std::map<std::pair<int64_t, int64_t>, int> tasks;
    for (const KeySplitTask& task : plan.tasks) {
      for (int64_t h = task.kv_heads.begin; h < task.kv_heads.end; ++h) {
        for (int64_t g = task.group_splits.begin; g < task.group_splits.end;
             ++g) {
          if (task.key_split == 0) ++tasks[{h, g}];
        }
      }
    }
    EXPECT_EQ(static_cast<int64_t>(tasks.size()), kv_heads * plan.group_splits);
    for (const auto& [split, count] : tasks) EXPECT_EQ(count, 1);
    return plan;
  };
  EXPECT_EQ(plan_of(1, 1024, 1).sequences[0].key_splits, 4);
  EXPECT_EQ(plan_of(4, 1024, 1).sequences[0].key_splits, 2);
  EXPECT_EQ(plan_of(4, 1024, 16).sequences[0].key_splits, 2);
  EXPECT_EQ(plan_of(16, 1024, 16, false, 1).sequences[0].key_splits, 2);
  for (const int threads : {1, 2, 16}) {
    EXPECT_EQ(plan_of(1, 1024, threads).group_splits, 1);
    EXPECT_EQ(plan_of(4, 1024, threads).group_splits, 4);
    EXPECT_EQ(plan_of(3, 1024, threads).group_splits, 3);
    EXPECT_EQ(plan_of(7, 1024, threads).group_splits, 7);
    EXPECT_EQ(plan_of(15, 1024, threads).group_splits, 8);
    EXPECT_EQ(plan_of(71, 1024, threads, false, 1).group_splits, 16);
    EXPECT_EQ(plan_of(4, 1024, threads, true).group_splits, 1);
    EXPECT_EQ(plan_of(4, 1024, threads, false, 15).group_splits, 2);
    EXPECT_EQ(plan_of(4, 1024, threads, false, 16).group_splits, 1);
    EXPECT_EQ(plan_of(4, 64, threads).group_splits,
              1);  // 2.6 million operations
    EXPECT_EQ(plan_of(4, 1024, threads, false, 4, false).group_splits, 1);
  }
  // Of one split a worker has one partial of dK and dV, of more two.
  EXPECT_EQ(plan_of(1, 1024, 1).dkv_partials(), 1);
  EXPECT_EQ(plan_of(4, 1024, 1).dkv_partials(), 2);
  EXPECT_EQ(plan_of(4, 1024, 16).dkv_partials(), 4);
  // Far queries: 512 bytes for each of a head, 8 MiB, or 16 MiB of a
  // block-invariant engine, whose group splits are worked through one by one.
  for (const bool invariant : {false, true}) {
    const int64_t kv_heads = invariant ? 16 : 4;
    const int64_t group = invariant ? 8 : 4;
    EXPECT_EQ(plan_of(group, 4096, 1, false, kv_heads, invariant).order,
              LoopOrder::kQueryOuter);
    EXPECT_EQ(plan_of(8 * group, 512, 1, false, kv_heads, invariant).order,
              LoopOrder::kQueryOuter);
    EXPECT_NE(plan_of(group, 4000, 1, false, kv_heads, invariant).order,
              LoopOrder::kQueryOuter);
    EXPECT_NE(plan_of(1, 65536, 1, false, kv_heads, invariant).order,
              LoopOrder::kQueryOuter);
    EXPECT_NE(plan_of(group, 4096, 16, false, kv_heads, invariant).order,
              LoopOrder::kQueryOuter);
    EXPECT_NE(plan_of(group, 4096, 1, true, kv_heads, invariant).order,
              LoopOrder::kQueryOuter);
  }
  EXPECT_EQ(plan_of(8, 4096, 1).order, LoopOrder::kKeyOuterGroupSplit);
  EXPECT_NE(plan_of(8, 4000, 1).order, LoopOrder::kKeyOuterGroupSplit);
}

// Waking a thread costs a microsecond: a call takes no more than help.
TEST(Plan, WorkersFollowTheWork) {
  const auto workers = [](const Shape& shape, int threads) {
    BackwardUse use;
    use.threads = threads;
    BackwardPlan plan;
    PlanBackward(ProblemOf(shape), EngineOf(true), use, &plan);
    return plan.workers;
  };
  const Shape one_block = {1, 128, 128, 64, false};
  const Shape short_heads = {64, 128, 128, 64, false};
  const Shape large = {16, 4096, 4096, 128, false};
  for (const int threads : {1, 2, 16, 64}) {
    EXPECT_EQ(workers(one_block, threads), 1);
    EXPECT_EQ(workers(large, threads), threads);
    EXPECT_LE(workers(short_heads, threads), threads);
  }
  EXPECT_EQ(workers(short_heads, 16), 16);
  EXPECT_LT(workers(short_heads, 64), 64);
}

// A forward packs K, then V, and attends: two items of one head in a step, but
// microseconds in all.
TEST(Plan, SmallCallsWakeNobody) {
  const auto workers = [](const Shape& shape, int threads) {
    ForwardPlan plan;
    PlanForward(ProblemOf(shape), EngineOf(true), threads, &plan);
    return plan.workers;
  };
  const Shape one_head = {1, 8, 8, 16, false};
  const Shape two_heads = {2, 16, 16, 32, false};
  const Shape many_heads = {96, 128, 128, 64, false};
  for (const int threads : {2, 16, 64}) {
    EXPECT_EQ(workers(one_head, threads), 1);
    EXPECT_EQ(workers(two_heads, threads), 1);
    EXPECT_GT(workers(many_heads, threads), 1);
  }
}

}  // namespace
}  // namespace fa2::attention
