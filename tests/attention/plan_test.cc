// SPDX-License-Identifier: Apache-2.0

// Plans: every key meets every query once, and no sum's order depends on the
// number of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "src/attention/schedule/backward_plan.h"
#include "src/attention/schedule/block_pairs.h"
#include "src/attention/schedule/forward_plan.h"
#include "tests/attention/plan_cases.h"

namespace fa2::attention {
namespace {

constexpr int64_t kUnit = 32;  // keys that no plan cuts

// What a plan adds to each sum, in order, in units of rows that no plan cuts.
struct Sums {
  // [unit of queries]: units of keys that each of dQ's partials adds.
  std::map<int64_t, std::vector<std::vector<int64_t>>> query;
  // [unit of keys]: units of queries that dK and dV add.
  std::map<int64_t, std::vector<int64_t>> key;
};

// The sums of the first head and, of its keys, of the first split of its group,
// in the order that LoopOrder tells; checks what holds within a plan.
void ReadPlan(const BackwardPlan& plan, Sums* sums) {
  const BackwardSequence& s = plan.sequences[0];
  std::vector<int> key_visits(static_cast<size_t>(s.keys.rows));
  std::vector<int64_t> splits;
  int64_t items = 0;
  for (int64_t c = 0; c < plan.head_batches.list[0].items.end; ++c) {
    const KeySplitTask& task = plan.tasks[c];
    const Interval blocks = s.keys.BlocksOf(task.key_split);
    items += blocks.size();
    if (task.kv_heads.begin != 0 || task.group_splits.begin != 0) continue;
    splits.push_back(task.key_split);
    for (int64_t kb = blocks.begin; kb < blocks.end; ++kb) {
      const Interval keys = s.keys.Block(kb);
      ASSERT_FALSE(keys.empty());
      ASSERT_LE(keys.size(), s.keys.size);
      ASSERT_LE(s.keys.size, plan.blocks.keys);
      ASSERT_GE(keys.begin, s.keys.Superblock(task.key_split).begin);
      ASSERT_LE(keys.end, s.keys.Superblock(task.key_split).end);
      for (int64_t k = keys.begin; k < keys.end; ++k) ++key_visits[k];
      std::vector<int64_t> query_blocks;
      const BlockPairs pairs(plan, task, 0, {kb, kb + 1});
      for (int64_t i = 0; i < pairs.size(); ++i) {
        const BlockPair pair = pairs[i];
        ASSERT_EQ(pair.keys.block, kb);
        ASSERT_EQ(pair.key_split, task.key_split);
        ASSERT_EQ(pair.queries.sequence, 0);
        if (pair.queries.head == 0) query_blocks.push_back(pair.queries.block);
      }
      for (const int64_t qb : query_blocks) {
        const Interval queries = s.queries.Block(qb);
        for (int64_t q = queries.begin; q < queries.end; q += kUnit) {
          auto& partials = sums->query[q / kUnit];
          partials.resize(static_cast<size_t>(s.key_splits));
          for (int64_t k = keys.begin; k < keys.end; k += kUnit) {
            partials[static_cast<size_t>(task.key_split)].push_back(k / kUnit);
          }
        }
        // Within a block, and from block to block, as the engine adds them.
        for (int64_t k = keys.begin; k < keys.end; k += kUnit) {
          auto& units = sums->key[k / kUnit];
          for (int64_t q = queries.begin; q < queries.end; q += kUnit) {
            units.push_back(q / kUnit);
          }
        }
      }
    }
  }
  EXPECT_LE(items, plan.largest_batch.items);
  std::sort(splits.begin(), splits.end());
  ASSERT_EQ(static_cast<int64_t>(splits.size()), s.key_splits);
  for (int64_t i = 0; i < s.key_splits; ++i) EXPECT_EQ(splits[i], i);
  for (const int visits : key_visits) ASSERT_EQ(visits, 1);
}

class PlanTest : public testing::TestWithParam<bool> {};

TEST_P(PlanTest, SumsDoNotDependOnThreads) {
  const simd::Engine engine = EngineOf(GetParam());
  std::vector<Shape> shapes;
  for (const bool causal : {false, true}) {
    for (const int64_t head_dim : {64, 256}) {
      for (const int64_t heads : {1, 3, 16}) {
        shapes.push_back({heads, 4096, 4096, head_dim, causal});
        shapes.push_back({heads, 1000, 1000, head_dim, causal});
        shapes.push_back({heads, 1, 2047, head_dim, causal});
        shapes.push_back({heads, 3000, 65, head_dim, causal});
        shapes.push_back({heads, 0, 100, head_dim, causal});
      }
      shapes.push_back({4, 1000, 1000, head_dim, causal, 6});
    }
  }
  for (const Shape& shape : shapes) {
    const Problem problem = ProblemOf(shape);
    for (const bool fixed : {false, true}) {
      Sums alone;
      simd::BlockSizes sizes;
      int64_t group_splits = 0;
      for (const int threads : {1, 2, 3, 8, 16, 64}) {
        SCOPED_TRACE("heads " + std::to_string(shape.heads) + " nq " +
                     std::to_string(shape.nq) + " nk " +
                     std::to_string(shape.nk) + " head_dim " +
                     std::to_string(shape.head_dim) +
                     (shape.causal ? " causal" : "") + " threads " +
                     std::to_string(threads));
        BackwardUse use;
        use.fixed_blocks = fixed;
        use.threads = threads;
        BackwardPlan plan;
        PlanBackward(problem, engine, use, &plan);
        Sums sums;
        ReadPlan(plan, &sums);
        if (HasFatalFailure()) return;
        const size_t key_units =
            static_cast<size_t>((shape.nk + kUnit - 1) / kUnit);
        const size_t query_units =
            static_cast<size_t>((shape.nq + kUnit - 1) / kUnit);
        for (const auto& [unit, partials] : sums.query) {
          size_t terms = 0;
          for (const auto& partial : partials) terms += partial.size();
          EXPECT_EQ(terms, key_units) << "queries from " << unit * kUnit;
        }
        for (const auto& [unit, terms] : sums.key) {
          EXPECT_EQ(terms.size(), query_units) << "keys from " << unit * kUnit;
        }
        if (threads == 1) {
          alone = sums;
          group_splits = plan.group_splits;
          sizes = {plan.sequences[0].keys.size, plan.sequences[0].queries.size};
          continue;
        }
        EXPECT_EQ(plan.group_splits, group_splits);
        EXPECT_EQ(sums.query, alone.query);
        EXPECT_EQ(sums.key, alone.key);
        if (fixed) {
          EXPECT_EQ(plan.sequences[0].keys.size, sizes.keys);
          EXPECT_EQ(plan.sequences[0].queries.size, sizes.queries);
        }
      }
    }
  }
}

// The forward's blocks of keys never depend on the threads. Those of queries
// may for block-invariant engines: one thread takes large ones, several share
// them out.
TEST_P(PlanTest, ForwardBlocks) {
  const Problem problem = ProblemOf({2, 4096, 4096, 64, false});
  ForwardPlan alone;
  PlanForward(problem, EngineOf(GetParam()), 1, &alone);
  const int64_t queries = alone.blocks.queries;
  EXPECT_EQ(queries, GetParam() ? 1024 : 128);
  for (const int threads : {1, 2, 16, 64}) {
    ForwardPlan plan;
    PlanForward(problem, EngineOf(GetParam()), threads, &plan);
    EXPECT_EQ(plan.blocks.keys, alone.blocks.keys);
    EXPECT_EQ(plan.blocks.queries, threads == 1 ? queries : 128);
    int64_t covered = 0;
    for (const ForwardItem& item : plan.items) {
      covered += plan.sequences[0].queries.Block(item.queries.block).size();
    }
    EXPECT_EQ(covered, 2 * 4096);
  }
}

// Items are weighed by what block masks leave visible of them, each head by its
// own lists, and no query sees more keys than the longest of these has. On many
// threads the item of the row that sees most is no more than one's share.
TEST_P(PlanTest, ByListedBlocks) {
  constexpr int64_t kRows = 32;
  Problem problem = ProblemOf({2, 4096, 4096, 64, false});
  // Head 0: the first row sees three blocks, the last one a block. Head 1: each
  // row sees the first block.
  std::vector<int32_t> counts(2 * kRows), indices(2 * kRows * 3);
  counts[0] = 3;
  counts[kRows - 1] = 1;
  indices[1] = 1;
  indices[2] = 31;
  std::fill(counts.begin() + kRows, counts.end(), 1);
  BlockMask mask;
  mask.kv_num_blocks =
      Dense(static_cast<const void*>(counts.data()), DType::kI32, 1, 2, kRows);
  mask.kv_indices = Dense(static_cast<const void*>(indices.data()), DType::kI32,
                          1, 2, kRows, 3);
  ASSERT_TRUE(problem.blocks.Set(&mask, {1, 2, 4096, 4096}).ok());
  Sequence& s = problem.sequences[0];
  s.pairs = problem.Pairs(s, {0, 2}, {0, 4096}, {0, 4096});
  constexpr double kBlock = 128.0 * 128.0;
  EXPECT_EQ(s.pairs, (4 + 32) * kBlock / 2);
  EXPECT_EQ(problem.most_keys(), 3 * 128);
  EXPECT_FALSE(problem.AnyListed(s, 0, {200, 300}, {0, 4096}));
  EXPECT_FALSE(problem.AnyListed(s, 0, {256, 3900}));
  EXPECT_TRUE(problem.AnyListed(s, 0, {3900, 4000}));
  ForwardPlan forward;
  PlanForward(problem, EngineOf(GetParam()), 2, &forward);
  double of_heads[2] = {};
  double before = forward.items[0].cost;
  for (const ForwardItem& item : forward.items) {
    EXPECT_LE(item.cost, before);
    before = item.cost;
    of_heads[item.queries.head] += item.cost;
  }
  EXPECT_EQ(of_heads[0], 4 * kBlock);
  EXPECT_EQ(of_heads[1], 32 * kBlock);
  EXPECT_EQ(forward.blocks.queries, 128);
  PlanForward(problem, EngineOf(GetParam()), 16, &forward);
  EXPECT_EQ(forward.blocks.queries, GetParam() ? 96 : 128);
  BackwardPlan backward;
  BackwardUse use;
  use.threads = 2;
  PlanBackward(problem, EngineOf(GetParam()), use, &backward);
  of_heads[0] = of_heads[1] = 0.0;
  for (const KeySplitTask& task : backward.tasks) {
    of_heads[task.kv_heads.begin] += task.cost;
  }
  EXPECT_EQ(of_heads[0], 4 * kBlock);
  EXPECT_EQ(of_heads[1], 32 * kBlock);
}

// Panels of sequences one after another do not overlap, and few are spare.
TEST(PanelsBefore, LeavesRoomForEverySequence) {
  for (const int64_t size : {1, 4, 16, 64}) {
    int64_t rows = 0, sequences = 0, used = 0;
    for (const int64_t of_sequence : {0, 1, 64, 63, 200, 0, 17, 1}) {
      const int64_t begin = PanelsBefore(rows, sequences, size);
      EXPECT_GE(begin, used);
      EXPECT_LE(begin, rows / size + sequences);
      used = begin + CeilDiv(of_sequence, size);
      rows += of_sequence;
      ++sequences;
    }
    EXPECT_GE(PanelsBefore(rows, sequences, size), used);
  }
}

// Every head of every sequence is in one head batch, whose tasks or items are
// its own; and what lies in a head batch's arrays does not overlap.
TEST_P(PlanTest, HeadBatchesCoverTheProblem) {
  const Problem problem =
      ProblemOf(6, {700, 0, 33, 2000, 64, 64, 64, 900, 1, 300}, true);
  const simd::Engine engine = EngineOf(GetParam());
  const size_t pairs = problem.sequences.size() * 6;
  for (const int threads : {1, 2, 4, 64}) {
    for (const bool share_heads : {false, true}) {
      BackwardUse use;
      use.threads = threads;
      use.share_heads = share_heads;
      BackwardPlan plan;
      PlanBackward(problem, engine, use, &plan);
      std::map<std::pair<int64_t, int64_t>, int> visits, keys;
      for (const HeadBatch& batch : plan.head_batches.list) {
        EXPECT_LE(batch.kv_heads.size(), plan.largest_batch.heads);
        EXPECT_LE(batch.items.end - batch.items.begin,
                  plan.largest_batch.tasks);
        int64_t q_rows = 0, dq_rows = 0;
        for (int64_t i = batch.sequences.begin; i < batch.sequences.end; ++i) {
          const BackwardSequence& s = plan.sequences[i];
          EXPECT_EQ(s.batch_q_row, q_rows);
          EXPECT_EQ(s.batch_dq_row, dq_rows);
          q_rows += s.queries.padded();
          dq_rows += s.key_splits * s.queries.padded();
          for (int64_t h = batch.kv_heads.begin; h < batch.kv_heads.end; ++h) {
            ++visits[{i, h}];
          }
        }
        EXPECT_LE(q_rows, plan.largest_batch.q_rows);
        EXPECT_LE(dq_rows, plan.largest_batch.dq_rows);
        for (int64_t n = batch.items.begin; n < batch.items.end; ++n) {
          const KeySplitTask& task = plan.tasks[n];
          EXPECT_GE(task.sequences.begin, batch.sequences.begin);
          EXPECT_LE(task.sequences.end, batch.sequences.end);
          EXPECT_GE(task.kv_heads.begin, batch.kv_heads.begin);
          EXPECT_LE(task.kv_heads.end, batch.kv_heads.end);
          if (task.key_split != 0) continue;
          for (int64_t h = task.kv_heads.begin; h < task.kv_heads.end; ++h) {
            ++keys[{task.sequences.begin, h}];
          }
        }
      }
      EXPECT_EQ(visits.size(), pairs);
      EXPECT_EQ(keys.size(), pairs);
      for (const auto& [pair, count] : visits) EXPECT_EQ(count, 1);
      for (const auto& [pair, count] : keys) EXPECT_EQ(count, 1);
    }
    ForwardPlan plan;
    PlanForward(problem, engine, threads, &plan);
    std::map<std::pair<int64_t, int64_t>, int64_t> rows;
    for (const HeadBatch& batch : plan.head_batches.list) {
      for (int64_t n = batch.items.begin; n < batch.items.end; ++n) {
        const ForwardItem& item = plan.items[n];
        EXPECT_GE(item.queries.sequence, batch.sequences.begin);
        EXPECT_LT(item.queries.sequence, batch.sequences.end);
        EXPECT_GE(item.queries.head, batch.kv_heads.begin);
        EXPECT_LT(item.queries.head, batch.kv_heads.end);
        rows[{item.queries.sequence, item.queries.head}] +=
            plan.sequences[item.queries.sequence]
                .queries.Block(item.queries.block)
                .size();
      }
    }
    for (size_t i = 0; i < problem.sequences.size(); ++i) {
      for (int64_t h = 0; h < 6; ++h) {
        const std::pair<int64_t, int64_t> key = {i, h};
        EXPECT_EQ(rows[key], problem.sequences[i].nq());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, PlanTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) {
                           return info.param ? "bitwise_block_invariant"
                                             : "varies_with_blocks";
                         });

}  // namespace
}  // namespace fa2::attention
