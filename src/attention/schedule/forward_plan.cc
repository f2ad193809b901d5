// SPDX-License-Identifier: Apache-2.0
#include "src/attention/schedule/forward_plan.h"

#include <algorithm>

#include "src/attention/schedule/keys_as_they_lie.h"
#include "src/attention/schedule/workers.h"

namespace fa2::attention {
namespace {

// The most queries of an item where several threads share them out. For one
// alone K and V come from L3 less often if it takes more (AMX, N 4096: D 64 844
// -> 861, D 128 1,033 -> 1,071, D 256 with half as many 1,181 -> 1,268
// GFLOP/s); on 16 threads, two of which share an L2, more gain nothing.
constexpr int64_t kSharedQueries = 256;

// The most queries of an item under a block mask, so that the one which sees
// most takes no longer than a thread's share of all: it would otherwise keep
// one thread busy when the others are done (a window with global tokens, one
// head of N 8192 on 16 threads: items of 128 queries, of which the first sees
// all keys, would take 1.8 times as long as even ones).
int64_t EvenQueries(const Problem& problem, double pairs, int threads) {
  return static_cast<int64_t>(
      pairs * static_cast<double>(problem.q_heads) /
      (static_cast<double>(threads) *
       static_cast<double>(std::max<int64_t>(problem.most_keys(), 1))));
}

// Adds the items of a head batch.
void ListItems(const Problem& problem, HeadBatch* batch, ForwardPlan* plan) {
  batch->items.begin = static_cast<int64_t>(plan->items.size());
  for (int64_t i = batch->sequences.begin; i < batch->sequences.end; ++i) {
    const Sequence& s = problem.sequences[i];
    const Blocks& queries = plan->sequences[i].queries;
    for (int64_t block = 0; block < queries.count(); ++block) {
      const auto cost_of = [&](int64_t head) {
        return problem.Pairs(s, {head, head + 1}, queries.Block(block),
                             {0, s.nk()});
      };
      double cost = problem.heads_differ() ? 0.0 : cost_of(0);
      for (int64_t head = batch->kv_heads.begin * problem.group();
           head < batch->kv_heads.end * problem.group(); ++head) {
        if (problem.heads_differ()) cost = cost_of(head);
        plan->items.push_back(
            {{i, head, block}, static_cast<int32_t>(plan->items.size()), cost});
      }
    }
  }
  batch->items.end = static_cast<int64_t>(plan->items.size());
  std::sort(plan->items.begin() + batch->items.begin, plan->items.end(),
            [](const ForwardItem& a, const ForwardItem& b) {
              return a.cost != b.cost ? a.cost > b.cost : a.rank < b.rank;
            });
}

// Items of one step, at most.
int64_t ItemsAtOnce(const ForwardPlan& plan) {
  if (plan.head_batches.alone) {
    return static_cast<int64_t>(plan.head_batches.list.size());
  }
  int64_t items = 0;
  for (const HeadBatch& batch : plan.head_batches.list) {
    items =
        std::max({items, batch.items.size(),
                  2 * plan.KeyBlocks(batch).size() * batch.kv_heads.size()});
  }
  return items;
}

}  // namespace

void PlanForward(const Problem& problem, const simd::Engine& engine,
                 int threads, ForwardPlan* plan) {
  plan->sequences.clear();
  plan->key_blocks.clear();
  plan->head_batches.list.clear();
  plan->items.clear();
  plan->workers = 1;
  plan->largest_batch = {};
  plan->k_blocks = 0;
  plan->blocks = {};
  const int64_t query_unit = BlockUnit(engine.query_panel, simd::kTileQueries);
  const int64_t key_unit = BlockUnit(engine.key_panel, simd::kTileKeys);
  simd::BlockSizes preferred =
      engine.forward_blocks(problem.head_dim, problem.value_dim);
  const int64_t owners = std::max<int64_t>(
      1, problem.q_heads * static_cast<int64_t>(problem.sequences.size()));
  const double pairs = problem.pairs();
  const double operations = 4.0 * pairs * static_cast<double>(problem.q_heads) *
                            static_cast<double>(problem.head_dim);
  // One block of queries for each head of keys, on lanes.
  const bool whole =
      problem.group() == 1 && !engine.bitwise_block_invariant &&
      std::all_of(problem.sequences.begin(), problem.sequences.end(),
                  [&](const Sequence& s) {
                    return s.nq() <=
                           FitBlock(std::min(preferred.queries, kSharedQueries),
                                    s.nq(), CeilDiv(kWantedItems, owners),
                                    query_unit);
                  });
  plan->head_batches.alone =
      threads > 1 && TakeHeadsAlone(problem, engine, pairs, operations,
                                    kShortForwardHead, whole, threads);
  plan->keys_in_turn = whole && plan->head_batches.threads(threads) == 1 &&
                       !problem.options.alibi_slopes.given();
  plan->keys_as_they_lie =
      plan->keys_in_turn && TakeKeysAsTheyLie(problem, engine);
  plan->k_as_it_lies = TakeKAsItLies(problem, engine);
  const bool as_large_as_liked = plan->head_batches.threads(threads) == 1 &&
                                 engine.bitwise_block_invariant;
  int64_t wanted = 1;
  if (!as_large_as_liked) {
    wanted = CeilDiv(kWantedItems, owners);
    preferred.queries = std::min(preferred.queries, kSharedQueries);
    if (problem.blocks.given() && engine.bitwise_block_invariant) {
      preferred.queries = std::clamp(
          EvenQueries(problem, pairs, threads) / query_unit * query_unit,
          RoundUp(kMinBlock, query_unit), preferred.queries);
    }
  }
  int64_t query_blocks = 0;
  for (size_t i = 0; i < problem.sequences.size(); ++i) {
    const Sequence& s = problem.sequences[i];
    ForwardSequence f;
    f.keys.rows = s.nk();
    f.queries.rows = s.nq();
    f.keys.panel = engine.key_panel;
    f.queries.panel = engine.query_grain;
    f.keys.size = FitBlock(preferred.keys, s.nk(), 1, key_unit);
    f.queries.size = FitBlock(preferred.queries, s.nq(), wanted, query_unit);
    f.k_block = plan->k_blocks;
    plan->k_blocks += f.keys.count();
    ListBlocks(f.keys, i, &plan->key_blocks);
    plan->blocks.keys = std::max(plan->blocks.keys, f.keys.size);
    plan->blocks.queries = std::max(plan->blocks.queries, f.queries.size);
    plan->sequences.push_back(f);
    query_blocks += f.queries.count();
  }
  const double least =
      LeastHeadBatch(problem, operations, plan->head_batches.threads(threads),
                     kForwardBatchItems, query_blocks * problem.group(), 1);
  CutHeadBatches(problem, pairs, least, &plan->head_batches.list);
  for (HeadBatch& batch : plan->head_batches.list) {
    if (batch.kv_heads.begin == 0) {
      int64_t rows = 0;
      for (int64_t i = batch.sequences.begin; i < batch.sequences.end; ++i) {
        plan->sequences[i].batch_k_row = rows;
        rows += plan->sequences[i].keys.padded();
      }
      plan->largest_batch.k_rows = std::max(plan->largest_batch.k_rows, rows);
    }
    plan->largest_batch.heads =
        std::max(plan->largest_batch.heads, batch.kv_heads.size());
    ListItems(problem, &batch, plan);
  }
  if (plan->keys_in_turn) plan->largest_batch.k_rows = plan->blocks.keys;
  plan->keys_ahead =
      plan->keys_in_turn ? plan->blocks.keys : problem.most_keys();
  SortAlone(&plan->head_batches);
  plan->workers = UsefulWorkers(threads, operations, ItemsAtOnce(*plan));
  plan->head_batches.read_ahead =
      ReadsAhead(problem, engine, plan->head_batches, plan->workers);
}

}  // namespace fa2::attention
