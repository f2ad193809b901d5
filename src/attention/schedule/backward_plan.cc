// SPDX-License-Identifier: Apache-2.0
#include "src/attention/schedule/backward_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "src/attention/schedule/keys_as_they_lie.h"
#include "src/attention/schedule/workers.h"

namespace fa2::attention {
namespace {

// What each of the wanted items is worth at least: some 16 us of an AMX core's
// time, 100 us of another's.
constexpr double kLeastOperations = 16e6;
// The threads that blocks are cut for where the number of them must not matter.
constexpr int kUsualThreads = 16;
// Packed queries of a group of heads, in bytes, that a core's share of L3 does
// not hold beside what else it works on; and for block-invariant engines: with
// some five times as many keys in a block, queries are read a fifth as often.
constexpr size_t kFarQueries = 8 << 20;
constexpr size_t kFarQueriesOfInvariant = 16 << 20;

// Where the sequences lie in arrays of one head of all of them.
void PlaceSequences(BackwardPlan* plan) {
  for (BackwardSequence& s : plan->sequences) {
    s.q_row = plan->q_rows;
    s.q_block = plan->q_blocks;
    s.k_block = plan->k_blocks;
    s.dq_block = plan->dq_blocks;
    plan->q_rows += s.queries.padded();
    plan->q_blocks += s.queries.count();
    plan->k_blocks += s.keys.count();
    plan->dq_blocks += s.key_splits * s.queries.count();
    plan->blocks.keys = std::max(plan->blocks.keys, s.keys.size);
    plan->blocks.queries = std::max(plan->blocks.queries, s.queries.size);
    const size_t index = static_cast<size_t>(&s - plan->sequences.data());
    ListBlocks(s.queries, index, &plan->query_blocks);
    ListBlocks(s.keys, index, &plan->key_blocks);
  }
}

// And in those of a head batch, one that begins with the first head.
void PlaceInBatch(const HeadBatch& batch, BackwardPlan* plan) {
  int64_t q_rows = 0, k_rows = 0, dq_rows = 0;
  for (int64_t i = batch.sequences.begin; i < batch.sequences.end; ++i) {
    BackwardSequence& s = plan->sequences[i];
    s.batch_q_row = q_rows;
    s.batch_k_row = k_rows;
    s.batch_dq_row = dq_rows;
    q_rows += s.queries.padded();
    k_rows += s.keys.padded();
    dq_rows += s.key_splits * s.queries.padded();
  }
  plan->largest_batch.q_rows = std::max(plan->largest_batch.q_rows, q_rows);
  plan->largest_batch.k_rows = std::max(plan->largest_batch.k_rows, k_rows);
  plan->largest_batch.dq_rows = std::max(plan->largest_batch.dq_rows, dq_rows);
}

// Adds the tasks of a head batch. Returns their items.
int64_t ListTasks(const Problem& problem, const BackwardUse& use,
                  HeadBatch* batch, BackwardPlan* plan) {
  batch->items.begin = static_cast<int64_t>(plan->tasks.size());
  int64_t items = 0;
  const int64_t item_heads = use.share_heads ? problem.kv_heads : 1;
  const int64_t item_splits =
      plan->order == LoopOrder::kKeyOuterGroupSplit ? 1 : plan->group_splits;
  const int64_t item_sequences =
      use.share_batch ? static_cast<int64_t>(problem.sequences.size()) : 1;
  for (int64_t i = batch->sequences.begin; i < batch->sequences.end;
       i += item_sequences) {
    const BackwardSequence& s = plan->sequences[i];
    for (int64_t split = 0; split < s.key_splits; ++split) {
      KeySplitTask task;
      task.key_split = split;
      task.sequences = {i, i + item_sequences};
      const auto cost = [&](int64_t kv_head) {
        return problem.Pairs(
            problem.sequences[i],
            {kv_head * problem.group(), (kv_head + 1) * problem.group()},
            {0, s.queries.rows}, s.keys.Superblock(split));
      };
      if (!problem.heads_differ()) task.cost = cost(0);
      for (int64_t head = batch->kv_heads.begin; head < batch->kv_heads.end;
           head += item_heads) {
        task.kv_heads = {head, head + item_heads};
        if (problem.heads_differ()) task.cost = cost(head);
        for (int64_t g = 0; g < plan->group_splits; g += item_splits) {
          task.group_splits = {g, g + item_splits};
          task.rank = static_cast<int32_t>(plan->tasks.size());
          plan->tasks.push_back(task);
          items += s.keys.BlocksOf(split).size();
        }
      }
    }
  }
  batch->items.end = static_cast<int64_t>(plan->tasks.size());
  // std::sort, unlike stable_sort, needs no memory; the ranks make it stable.
  std::sort(plan->tasks.begin() + batch->items.begin, plan->tasks.end(),
            [](const KeySplitTask& a, const KeySplitTask& b) {
              return a.cost != b.cost ? a.cost > b.cost : a.rank < b.rank;
            });
  if (plan->bias_groups > 0) {
    for (int64_t t = batch->items.begin; t < batch->items.end; ++t) {
      plan->tasks[t].bias_group = batch - plan->head_batches.list.data();
    }
    plan->tasks.back().ends_bias_group = true;
  }
  return items;
}

// Whether all queries of a group would come from memory for each key block, so
// that one worker has queries outermost: a superblock of them in several heads
// shares what it reads of a key block (with 8 MiB of them bf16 dots on Zen 4
// are 1 to 4% faster and AMX 1 to 8% slower, with 16 and 32 MiB 3 to 4% and 1
// and 13% faster; with 4 MiB, or one head, dots 0 to 1% slower). Group splits
// are taken one after another instead, as heads of their own keys are.
bool HasFarQueries(const Problem& problem, const simd::Engine& engine,
                   const std::vector<BackwardSequence>& sequences) {
  if (problem.group() == 1) return false;
  int64_t rows = 0;
  for (const BackwardSequence& s : sequences) {
    rows = std::max(rows, s.queries.padded());
  }
  size_t bytes = 0;
  for (const int64_t depth : {problem.head_dim, problem.value_dim}) {
    bytes += engine.packed_bytes(simd::Role::kScoreRight, rows, depth) +
             engine.packed_bytes(simd::Role::kGradRight, rows, depth);
  }
  return bytes * static_cast<size_t>(problem.group()) >=
         (engine.bitwise_block_invariant ? kFarQueriesOfInvariant
                                         : kFarQueries);
}

// Cuts all sequences: each gets key blocks, and workers, by its share of the
// work.
void CutSequences(const Problem& problem, const simd::Engine& engine,
                  const BackwardUse& use, double pairs, double operations,
                  BackwardPlan* plan) {
  const double items = std::clamp(operations / kLeastOperations, 1.0,
                                  static_cast<double>(kWantedItems));
  const int threads = use.fixed_blocks ? kUsualThreads : use.threads;
  plan->group = problem.group();
  plan->group_splits =
      use.share_heads || use.share_batch
          ? 1
          : GroupSplits(problem, engine, static_cast<int64_t>(items));
  const int64_t heads =
      (use.share_heads ? 1 : problem.kv_heads) * plan->group_splits;
  for (const Sequence& s : problem.sequences) {
    const double of_sequence = s.pairs;
    // With shared owners every sequence must be cut alike.
    const double sequences = static_cast<double>(problem.sequences.size());
    const double share = use.share_batch || pairs == 0.0
                             ? 1.0 / (use.share_batch ? 1.0 : sequences)
                             : of_sequence / pairs;
    const auto of_split = [&](double all) {
      return std::max<int64_t>(
          1,
          std::llround(std::ceil(
              all * share / static_cast<double>(std::max<int64_t>(heads, 1)))));
    };
    BackwardSequence cut;
    CutSequence(problem, engine, s, of_sequence, plan->group_splits,
                of_split(items),
                of_split(std::min(items, static_cast<double>(threads))),
                use.fixed_blocks, &cut);
    plan->sequences.push_back(cut);
  }
}

// The bias groups of a dbias that all sequences share, where a head is one
// block pair: a worker takes a run of sequences of one head, as one without
// dbias takes heads. Not by the threads, which the order of the sums must not
// show.
int64_t BiasGroups(const Problem& problem, const BackwardUse& use,
                   const BackwardPlan& plan) {
  const bool one_pair =
      problem.group() == 1 &&
      std::all_of(plan.sequences.begin(), plan.sequences.end(),
                  [](const BackwardSequence& s) {
                    return s.keys.count() == 1 && s.queries.count() == 1;
                  });
  if (!use.share_batch || !use.sum_blocks || !one_pair) return 0;
  return std::clamp<int64_t>(CeilDiv(kWantedItems, problem.kv_heads), 1,
                             static_cast<int64_t>(plan.sequences.size()));
}

// Adds a head batch for each head of each bias group.
void CutBiasGroups(const Problem& problem, int64_t groups,
                   std::vector<HeadBatch>* batches) {
  const int64_t sequences = static_cast<int64_t>(problem.sequences.size());
  for (int64_t g = 0; g < groups; ++g) {
    HeadBatch batch;
    batch.sequences = {g * sequences / groups, (g + 1) * sequences / groups};
    for (int64_t s = batch.sequences.begin; s < batch.sequences.end; ++s) {
      batch.cost += problem.sequences[s].pairs;
    }
    for (int64_t head = 0; head < problem.kv_heads; ++head) {
      batch.kv_heads = {head, head + 1};
      batches->push_back(batch);
    }
  }
}

// Items of one step that do not wait for one another, at most.
int64_t ItemsAtOnce(const Problem& problem, const BackwardPlan& plan) {
  if (plan.head_batches.alone) {
    return static_cast<int64_t>(plan.head_batches.list.size());
  }
  int64_t items = std::max(plan.largest_batch.items, plan.largest_batch.tasks);
  for (const HeadBatch& batch : plan.head_batches.list) {
    items = std::max(items, plan.QueryBlocks(batch).size() *
                                batch.kv_heads.size() * problem.group());
  }
  return items;
}

// Empties a plan. What its lists have allocated stays.
void Clear(BackwardPlan* plan) {
  BackwardPlan empty;
  const auto keep = [](auto* from, auto* to) {
    from->clear();
    to->swap(*from);
  };
  keep(&plan->sequences, &empty.sequences);
  keep(&plan->query_blocks, &empty.query_blocks);
  keep(&plan->key_blocks, &empty.key_blocks);
  keep(&plan->head_batches.list, &empty.head_batches.list);
  keep(&plan->tasks, &empty.tasks);
  *plan = std::move(empty);
}

}  // namespace

void PlanBackward(const Problem& problem, const simd::Engine& engine,
                  const BackwardUse& wanted, BackwardPlan* plan) {
  Clear(plan);
  const int64_t sequence_count = static_cast<int64_t>(problem.sequences.size());
  const double total = problem.pairs();
  const double operations = 10.0 * total *
                            static_cast<double>(problem.q_heads) *
                            static_cast<double>(problem.head_dim);
  // As without dbias, if that leaves it bias groups.
  BackwardUse use = wanted;
  use.share_batch = use.share_heads = false;
  CutSequences(problem, engine, use, total, operations, plan);
  plan->bias_groups = BiasGroups(problem, wanted, *plan);
  if (plan->bias_groups == 0 && (wanted.share_batch || wanted.share_heads)) {
    use = wanted;
    plan->sequences.clear();
    CutSequences(problem, engine, use, total, operations, plan);
  }
  const bool shared = use.share_heads || use.share_batch;
  PlaceSequences(plan);
  if (sequence_count == 0) return;

  // One block of keys for each head, on lanes.
  const bool one_block =
      !engine.bitwise_block_invariant &&
      std::all_of(
          plan->sequences.begin(), plan->sequences.end(),
          [](const BackwardSequence& s) { return s.keys.count() == 1; });
  plan->head_batches.alone =
      use.threads > 1 && !shared &&
      (plan->bias_groups > 0 ||
       TakeHeadsAlone(problem, engine, total, operations, kShortBackwardHead,
                      one_block && plan->group_splits == 1, use.threads));
  const int batch_threads = plan->head_batches.threads(use.threads);
  const bool far_queries = !shared && batch_threads == 1 &&
                           HasFarQueries(problem, engine, plan->sequences);
  if (plan->group_splits > 1 && (batch_threads > 1 || far_queries)) {
    plan->order = LoopOrder::kKeyOuterGroupSplit;
  } else if (far_queries) {
    plan->order = LoopOrder::kQueryOuter;
  }
  double least =
      LeastHeadBatch(problem, operations, batch_threads, kBackwardBatchItems,
                     plan->k_blocks, plan->group_splits);
  if (shared) least = std::max(least, 1.0);
  if (use.share_heads) least = static_cast<double>(problem.kv_heads);
  if (plan->bias_groups > 0) {
    CutBiasGroups(problem, plan->bias_groups, &plan->head_batches.list);
  } else {
    CutHeadBatches(problem, total, least, &plan->head_batches.list);
  }
  for (HeadBatch& batch : plan->head_batches.list) {
    if (batch.kv_heads.begin == 0) PlaceInBatch(batch, plan);
    plan->largest_batch.items = std::max(plan->largest_batch.items,
                                         ListTasks(problem, use, &batch, plan));
    plan->largest_batch.heads =
        std::max(plan->largest_batch.heads, batch.kv_heads.size());
    plan->largest_batch.tasks = std::max(plan->largest_batch.tasks,
                                         batch.items.end - batch.items.begin);
  }
  plan->queries_in_turn = one_block && !shared && batch_threads == 1 &&
                          plan->order == LoopOrder::kKeyOuter &&
                          !problem.options.alibi_slopes.given();
  plan->keys_as_they_lie =
      plan->queries_in_turn && TakeKeysAsTheyLie(problem, engine);
  if (plan->queries_in_turn) {
    plan->largest_batch.q_rows = plan->largest_batch.dq_rows =
        plan->blocks.queries;
  }
  plan->keys_in_batch = (use.share_heads && problem.kv_heads > 1) ||
                        (use.share_batch && sequence_count > 1) ||
                        plan->order != LoopOrder::kKeyOuter;
  SortAlone(&plan->head_batches);
  plan->workers =
      UsefulWorkers(use.threads, operations, ItemsAtOnce(problem, *plan));
  plan->head_batches.read_ahead =
      ReadsAhead(problem, engine, plan->head_batches, plan->workers);
}

}  // namespace fa2::attention
