// The plan of the backward: every key meets every query once, no two items of a
// step add to the same sums, and no sum's order depends on the number of
// threads.
#include "src/attention/plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fa2/attention.h"
#include "src/attention/problem.h"
#include "src/simd/engine.h"

namespace fa2::attention {
namespace {

constexpr int64_t kUnit = 32;  // keys that no plan cuts

simd::Engine EngineOf(bool joins) {
  simd::Engine engine;
  engine.query_panel = 32;
  engine.key_panel = 32;
  engine.key_blocks_join = joins;
  engine.backward_blocks = [](int64_t head_dim, int64_t) {
    return head_dim <= 64 ? simd::BlockSizes{1024, 512}
                          : simd::BlockSizes{256, 256};
  };
  return engine;
}

struct Shape {
  int64_t heads, nq, nk, head_dim;
  bool causal;
};

Problem ProblemOf(const Shape& shape) {
  Problem problem;
  problem.q_heads = problem.kv_heads = shape.heads;
  problem.head_dim = problem.value_dim = shape.head_dim;
  if (shape.causal) problem.options.causal = Causal::kBottomRight;
  Sequence sequence;
  sequence.mask = Mask(problem.options, shape.nq, shape.nk);
  problem.sequences.push_back(sequence);
  return problem;
}

// What a plan adds to each sum, in order.
struct Sums {
  // [split, query block]: units of keys that dQ's partial adds.
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> query;
  // [unit of keys]: query blocks that dK and dV add.
  std::map<int64_t, std::vector<int64_t>> key;
};

// The sums of the first head; checks what holds within a plan.
void ReadPlan(const BackwardPlan& plan, Sums* sums) {
  const BackwardSequence& s = plan.sequences[0];
  std::map<int64_t, std::pair<int64_t, int64_t>> visits;  // [block] steps
  std::map<int64_t, int64_t> last_step;
  for (int64_t step = 0; step < plan.steps; ++step) {
    std::map<std::pair<int64_t, int64_t>, int64_t> query_owner;
    std::map<int64_t, int64_t> key_owner;
    for (int64_t i = plan.step_begin[step]; i < plan.step_begin[step + 1];
         ++i) {
      const BackwardItem& item = plan.items[i];
      if (item.head_begin != 0) continue;
      ASSERT_EQ(item.step, step);
      ForEachCell(s, item, [&](int64_t block, Interval keys, int64_t range) {
        visits.insert({block, {step, step}}).first->second.second = step;
        last_step[block] = LastStep(s, item, block);
        ASSERT_EQ(key_owner.insert({block, i}).first->second, i);
        const BlockRange queries =
            RangeOf(range, s.phases, s.queries.count(), s.fold_queries);
        for (const Interval& run : queries.runs) {
          for (int64_t qb = run.begin; qb < run.end; ++qb) {
            const std::pair<int64_t, int64_t> rows = {item.split, qb};
            ASSERT_EQ(query_owner.insert({rows, i}).first->second, i);
            for (int64_t key = keys.begin; key < keys.end; key += kUnit) {
              sums->query[rows].push_back(key / kUnit);
              sums->key[key / kUnit].push_back(qb);
            }
          }
        }
      });
    }
  }
  EXPECT_EQ(static_cast<int64_t>(visits.size()), s.keys.count());
  for (const auto& [block, steps] : visits) {
    EXPECT_EQ(steps.first, 0) << "block " << block;
    EXPECT_EQ(steps.second, last_step[block]) << "block " << block;
  }
  const int64_t units = (s.keys.rows + kUnit - 1) / kUnit;
  EXPECT_EQ(static_cast<int64_t>(sums->key.size()),
            s.queries.count() > 0 ? units : 0);
  for (const auto& [unit, blocks] : sums->key) {
    std::vector<int> count(static_cast<size_t>(s.queries.count()));
    for (int64_t block : blocks) ++count[static_cast<size_t>(block)];
    for (int n : count) EXPECT_EQ(n, 1) << "keys from " << unit * kUnit;
  }
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
    }
  }
  for (const Shape& shape : shapes) {
    const Problem problem = ProblemOf(shape);
    for (const bool score_gradients : {false, true}) {
      Sums alone;
      for (const int threads : {1, 2, 3, 8, 16, 64}) {
        SCOPED_TRACE("heads " + std::to_string(shape.heads) + " nq " +
                     std::to_string(shape.nq) + " nk " +
                     std::to_string(shape.nk) + " head_dim " +
                     std::to_string(shape.head_dim) +
                     (shape.causal ? " causal" : "") + " threads " +
                     std::to_string(threads));
        BackwardUse use;
        use.score_gradients = score_gradients;
        use.threads = threads;
        BackwardPlan plan;
        PlanBackward(problem, engine, use, &plan);
        Sums sums;
        ReadPlan(plan, &sums);
        if (HasFatalFailure()) return;
        if (threads == 1) {
          alone = sums;
          continue;
        }
        EXPECT_EQ(sums.query, alone.query);
        EXPECT_EQ(sums.key, alone.key);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, PlanTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) {
                           return info.param ? "blocks_join" : "blocks_stay";
                         });

}  // namespace
}  // namespace fa2::attention
