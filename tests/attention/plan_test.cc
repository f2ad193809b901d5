// Plans: every key meets every query once, and no sum's order depends on the
// number of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fa2/attention.h"
#include "src/attention/call/problem.h"
#include "src/attention/schedule/backward_plan.h"
#include "src/attention/schedule/forward_plan.h"
#include "src/simd/engine.h"

namespace fa2::attention {
namespace {

constexpr int64_t kUnit = 32;  // keys that no plan cuts

simd::Engine EngineOf(bool joins) {
  simd::Engine engine;
  engine.query_panel = 32;
  engine.key_panel = 32;
  engine.bitwise_block_invariant = joins;
  engine.backward_blocks = [](int64_t head_dim, int64_t) {
    return head_dim <= 64 ? simd::BlockSizes{1024, 512}
                          : simd::BlockSizes{256, 256};
  };
  engine.forward_blocks = [](int64_t, int64_t) {
    return simd::BlockSizes{1024, 1024};
  };
  engine.packed_bytes = [](simd::Role, int64_t rows, int64_t depth) {
    return static_cast<size_t>(2 * rows * depth);
  };
  return engine;
}

struct Shape {
  int64_t heads, nq, nk, head_dim;
  bool causal;
  int64_t group = 1;
};

Problem ProblemOf(const Shape& shape) {
  Problem problem;
  problem.kv_heads = shape.heads;
  problem.q_heads = shape.heads * shape.group;
  problem.head_dim = problem.value_dim = shape.head_dim;
  if (shape.causal) problem.options.causal = Causal::kBottomRight;
  Sequence sequence;
  sequence.mask = Mask(problem.options, shape.nq, shape.nk);
  problem.sequences.push_back(sequence);
  return problem;
}

// Heads of self-attention over sequences of the given lengths.
Problem ProblemOf(int64_t heads, const std::vector<int64_t>& lengths,
                  bool causal) {
  Problem problem = ProblemOf({heads, 0, 0, 64, causal});
  problem.sequences.clear();
  for (const int64_t rows : lengths) {
    Sequence sequence;
    sequence.mask = Mask(problem.options, rows, rows);
    problem.sequences.push_back(sequence);
  }
  return problem;
}

// What a plan adds to each sum, in order, in units of rows that no plan cuts.
struct Sums {
  // [unit of queries]: units of keys that each of dQ's partials adds.
  std::map<int64_t, std::vector<std::vector<int64_t>>> query;
  // [unit of keys]: units of queries that dK and dV add.
  std::map<int64_t, std::vector<int64_t>> key;
};

// The sums of the first head and, of its keys, of the first part of its group,
// in the order that BackwardChain tells; checks what holds within a plan.
void ReadPlan(const BackwardPlan& plan, Sums* sums) {
  const BackwardSequence& s = plan.sequences[0];
  std::vector<int> key_visits(static_cast<size_t>(s.keys.rows));
  std::vector<int64_t> splits;
  int64_t items = 0;
  for (int64_t c = 0; c < plan.waves.list[0].end; ++c) {
    const BackwardChain& chain = plan.chains[c];
    const Interval blocks = s.keys.RunBlocks(chain.split);
    items += blocks.size();
    if (chain.head_begin != 0 || chain.part_begin != 0) continue;
    splits.push_back(chain.split);
    for (int64_t kb = blocks.begin; kb < blocks.end; ++kb) {
      const Interval keys = s.keys.Block(kb);
      ASSERT_FALSE(keys.empty());
      ASSERT_LE(keys.size(), s.keys.size);
      ASSERT_LE(s.keys.size, plan.blocks.keys);
      ASSERT_GE(keys.begin, s.keys.Run(chain.split).begin);
      ASSERT_LE(keys.end, s.keys.Run(chain.split).end);
      for (int64_t k = keys.begin; k < keys.end; ++k) ++key_visits[k];
      std::vector<int64_t> query_blocks;
      for (int64_t run = s.queries.runs() - 1; run >= 0; --run) {
        const Interval of_run = s.queries.RunBlocks(run);
        for (int64_t b = of_run.begin; b < of_run.end; ++b) {
          query_blocks.push_back(b);
        }
      }
      for (const int64_t qb : query_blocks) {
        const Interval queries = s.queries.Block(qb);
        for (int64_t q = queries.begin; q < queries.end; q += kUnit) {
          auto& partials = sums->query[q / kUnit];
          partials.resize(static_cast<size_t>(s.splits));
          for (int64_t k = keys.begin; k < keys.end; k += kUnit) {
            partials[static_cast<size_t>(chain.split)].push_back(k / kUnit);
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
  EXPECT_LE(items, plan.wave_items);
  std::sort(splits.begin(), splits.end());
  ASSERT_EQ(static_cast<int64_t>(splits.size()), s.splits);
  for (int64_t i = 0; i < s.splits; ++i) EXPECT_EQ(splits[i], i);
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
      int64_t parts = 0;
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
          parts = plan.parts;
          sizes = {plan.sequences[0].keys.size, plan.sequences[0].queries.size};
          continue;
        }
        EXPECT_EQ(plan.parts, parts);
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
// may where blocks join: one thread takes large ones, several share them out.
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
      covered += plan.sequences[0].queries.Block(item.block).size();
    }
    EXPECT_EQ(covered, 2 * 4096);
  }
}

// Every head of every sequence is in one wave, whose chains or items are its
// own; and what lies in a wave's part of the workspace does not overlap.
TEST_P(PlanTest, WavesCoverTheProblem) {
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
      for (const Wave& wave : plan.waves.list) {
        EXPECT_LE(wave.heads(), plan.wave_heads);
        EXPECT_LE(wave.end - wave.begin, plan.wave_chains);
        int64_t q_rows = 0, dq_rows = 0;
        for (int64_t i = wave.sequence_begin; i < wave.sequence_end; ++i) {
          const BackwardSequence& s = plan.sequences[i];
          EXPECT_EQ(s.wave_q_row, q_rows);
          EXPECT_EQ(s.wave_dq_row, dq_rows);
          q_rows += s.queries.padded();
          dq_rows += s.splits * s.queries.padded();
          for (int64_t h = wave.head_begin; h < wave.head_end; ++h) {
            ++visits[{i, h}];
          }
        }
        EXPECT_LE(q_rows, plan.wave_q_rows);
        EXPECT_LE(dq_rows, plan.wave_dq_rows);
        for (int64_t n = wave.begin; n < wave.end; ++n) {
          const BackwardChain& chain = plan.chains[n];
          EXPECT_GE(chain.sequence_begin, wave.sequence_begin);
          EXPECT_LE(chain.sequence_end, wave.sequence_end);
          EXPECT_GE(chain.head_begin, wave.head_begin);
          EXPECT_LE(chain.head_end, wave.head_end);
          if (chain.split != 0) continue;
          for (int64_t h = chain.head_begin; h < chain.head_end; ++h) {
            ++keys[{chain.sequence_begin, h}];
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
    for (const Wave& wave : plan.waves.list) {
      for (int64_t n = wave.begin; n < wave.end; ++n) {
        const ForwardItem& item = plan.items[n];
        EXPECT_GE(item.sequence, wave.sequence_begin);
        EXPECT_LT(item.sequence, wave.sequence_end);
        EXPECT_GE(item.head, wave.head_begin);
        EXPECT_LT(item.head, wave.head_end);
        rows[{item.sequence, item.head}] +=
            plan.sequences[item.sequence].queries.Block(item.block).size();
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
      EXPECT_EQ(forward.waves.alone, backward.waves.alone);
    }
    return backward.waves.alone;
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

// Heads that share their keys: several threads work through parts of their
// group, whatever its size; and where their queries are many one worker passes
// the keys by them. The workspace of a wave holds all keys then.
TEST(Plan, GroupedHeads) {
  const auto plan_of = [](int64_t group, int64_t rows, int threads,
                          bool share_heads = false, int64_t kv_heads = 4,
                          bool joins = true) {
    const Problem problem = ProblemOf({kv_heads, rows, rows, 64, false, group});
    BackwardUse use;
    use.threads = threads;
    use.share_heads = share_heads;
    BackwardPlan plan;
    PlanBackward(problem, EngineOf(joins), use, &plan);
    EXPECT_EQ(plan.shared_keys,
              plan.by_queries || plan.by_parts || share_heads);
    EXPECT_FALSE(plan.by_parts && plan.by_queries);
    if (plan.waves.threads(threads) > 1) {
      EXPECT_EQ(plan.by_parts, plan.parts > 1);
      EXPECT_FALSE(plan.by_queries);
    }
    // Each query head is in one part of one kv head.
    int64_t heads = 0;
    for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      for (int64_t part = 0; part < plan.parts; ++part) {
        const Interval of_part = plan.PartHeads(kv_head, part);
        EXPECT_EQ(of_part.begin, heads);
        EXPECT_FALSE(of_part.empty());
        heads = of_part.end;
      }
    }
    EXPECT_EQ(heads, kv_heads * group);
    // A chain for each part, or for all of a kv head.
    std::map<std::pair<int64_t, int64_t>, int> chains;
    for (const BackwardChain& chain : plan.chains) {
      for (int64_t h = chain.head_begin; h < chain.head_end; ++h) {
        for (int64_t part = chain.part_begin; part < chain.part_end; ++part) {
          if (chain.split == 0) ++chains[{h, part}];
        }
      }
    }
    EXPECT_EQ(static_cast<int64_t>(chains.size()), kv_heads * plan.parts);
    for (const auto& [part, count] : chains) EXPECT_EQ(count, 1);
    return plan;
  };
  EXPECT_EQ(plan_of(1, 1024, 1).sequences[0].splits, 4);
  EXPECT_EQ(plan_of(4, 1024, 1).sequences[0].splits, 2);
  EXPECT_EQ(plan_of(4, 1024, 16).sequences[0].splits, 2);
  EXPECT_EQ(plan_of(16, 1024, 16, false, 1).sequences[0].splits, 2);
  for (const int threads : {1, 2, 16}) {
    EXPECT_EQ(plan_of(1, 1024, threads).parts, 1);
    EXPECT_EQ(plan_of(4, 1024, threads).parts, 4);
    EXPECT_EQ(plan_of(3, 1024, threads).parts, 3);
    EXPECT_EQ(plan_of(7, 1024, threads).parts, 7);
    EXPECT_EQ(plan_of(15, 1024, threads).parts, 8);
    EXPECT_EQ(plan_of(71, 1024, threads, false, 1).parts, 16);
    EXPECT_EQ(plan_of(4, 1024, threads, true).parts, 1);
    EXPECT_EQ(plan_of(4, 1024, threads, false, 15).parts, 2);
    EXPECT_EQ(plan_of(4, 1024, threads, false, 16).parts, 1);
    EXPECT_EQ(plan_of(4, 64, threads).parts, 1);  // 2.6 million operations
    EXPECT_EQ(plan_of(4, 1024, threads, false, 4, false).parts, 1);
  }
  // Of one part a worker has one slot for dK and dV, of more two.
  EXPECT_EQ(plan_of(1, 1024, 1).slots(), 1);
  EXPECT_EQ(plan_of(4, 1024, 1).slots(), 2);
  EXPECT_EQ(plan_of(4, 1024, 16).slots(), 4);
  // Far queries: 512 bytes for each of a head, 8 MiB, or 16 MiB where blocks
  // join. Parts are worked through one by one then.
  for (const bool joins : {false, true}) {
    const int64_t kv_heads = joins ? 16 : 4;
    const int64_t group = joins ? 8 : 4;
    EXPECT_TRUE(plan_of(group, 4096, 1, false, kv_heads, joins).by_queries);
    EXPECT_TRUE(plan_of(8 * group, 512, 1, false, kv_heads, joins).by_queries);
    EXPECT_FALSE(plan_of(group, 4000, 1, false, kv_heads, joins).by_queries);
    EXPECT_FALSE(plan_of(1, 65536, 1, false, kv_heads, joins).by_queries);
    EXPECT_FALSE(plan_of(group, 4096, 16, false, kv_heads, joins).by_queries);
    EXPECT_FALSE(plan_of(group, 4096, 1, true, kv_heads, joins).by_queries);
  }
  EXPECT_TRUE(plan_of(8, 4096, 1).by_parts);
  EXPECT_FALSE(plan_of(8, 4000, 1).by_parts);
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

INSTANTIATE_TEST_SUITE_P(, PlanTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) {
                           return info.param ? "bitwise_block_invariant"
                                             : "varies_with_blocks";
                         });

}  // namespace
}  // namespace fa2::attention
