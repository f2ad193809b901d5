// SPDX-License-Identifier: Apache-2.0

// FlashAttention-2 backward (Dao 2023, algorithm 2), key blocks outermost. For
// each batch of heads:
//
//   preprocess  pack Q, dO once a head; delta = rowsum(O dO) - dlse
//   main loop   key blocks, in parallel; of each
//                 pack K, V
//                 for each query block, of each query head that shares the keys
//                   S^T = K Q^T, dP^T = V dO^T, P = exp(S - lse),
//                   dS = P (dP - delta); dV += P^T dO, dK += dS^T Q,
//                   dQ += dS K (to the partial of the key split)
//                 scale, round and store dK, dV
//   reduction   dQ partials in order of their key split; scale, round, store
//
// The key blocks of a split add to a query block in order, which a semaphore
// keeps, so that every sum has one order on any number of threads. Where many
// query heads share the keys the loops differ: see LoopOrder.
#include <algorithm>
#include <new>

#include "src/attention/backward/buffers.h"
#include "src/attention/backward/gradients.h"
#include "src/attention/backward/operands.h"
#include "src/attention/call/pass_call.h"
#include "src/attention/few_queries/few_backward.h"
#include "src/attention/schedule/block_pairs.h"
#include "src/attention/schedule/head_batch_loop.h"
#include "src/attention/scores/non_finite.h"

namespace fa2 {
namespace attention {
namespace {

using threading::Team;
using threading::Wavefront;

// ---- Main loop: one block pair.

// `next`: the pair after this one, or an empty one.
void ProcessPair(const BackwardState& call, WorkerBuffers& worker,
                 const KeySplitTask& task, const BlockPair& pair,
                 const PairRows& next, DqSemaphore semaphore) {
  if (call.plan.queries_in_turn) PackQueries(call, worker, pair.queries);
  const PairRows rows = call.plan.Rows(pair);
  simd::BackwardBlock block;
  const bool visible = worker.scores.Prepare(rows, next, &block);
  if (visible) {
    worker.ahead.TakeShare(&block.ahead);
    const QueryOperands q = worker.Queries(pair.queries);
    block.scratch = worker.engine_scratch;
    TakeKeys(call, worker, pair.keys, &block);
    block.q_score = q.q_score;
    block.q_grad = q.q_grad;
    block.dout_score = q.dout_score;
    block.dout_grad = q.dout_grad;
    block.lse = q.lse;
    block.delta = q.delta;
    if (call.args.dq.given()) {
      semaphore.Guard(worker.Dq(pair.queries, pair.key_split),
                      !worker.bias.needs_semaphore(), &block);
    }
    const DkvAccum dkv = worker.Dkv(pair.keys, pair.dkv_partial);
    if (call.args.dk.given()) block.dk = dkv.dk;
    if (call.args.dv.given()) block.dv = dkv.dv;
    block.add_to_dk = block.add_to_dv = *dkv.touched != 0;
    *dkv.touched = 1;
    if (call.buffers.small.wants_alibi()) {
      block.alibi_gradient = &call.buffers.small.AlibiTerm(
          pair.queries.head,
          call.plan.sequences[pair.keys.sequence].k_block + pair.keys.block);
    }
    worker.bias.Begin(rows, task, &block);
    call.engine.backward(block);
  }
  worker.bias.End(rows, task, pair.key_split, visible, &semaphore);
  if (call.plan.queries_in_turn && call.args.dq.given()) {
    StoreQueryGradient(call, worker, pair.queries);
  }
}

// The pair whose bias is prefetched beside the products of pair i.
PairRows PairAfter(const BackwardState& call, const BlockPairs& pairs,
                   int64_t i) {
  return i + 1 < pairs.size() ? call.plan.Rows(pairs[i + 1]) : PairRows();
}

// All pairs of a list, as the steps of an item from `first_step` on.
void ProcessPairs(const BackwardState& call, WorkerBuffers& worker,
                  const KeySplitTask& task, const BlockPairs& pairs,
                  Wavefront::Semaphore* semaphore, int64_t first_step) {
  const int64_t count = pairs.size();
  for (int64_t i = 0; i < count; ++i) {
    ProcessPair(call, worker, task, pairs[i], PairAfter(call, pairs, i),
                DqSemaphore(semaphore, first_step + i));
  }
}

// ---- Main loop: the orders.

// What a worker alone reads after a key block: the next one's keys or, after
// the last, the next head.
void ReadAheadOfKeys(const BackwardState& call, WorkerBuffers& worker,
                     const KeySplitTask& task, int64_t key_block) {
  if (!call.plan.head_batches.read_ahead) return;
  const Problem& problem = call.problem;
  const int64_t s = task.sequences.begin;
  const BackwardSequence& sequence = call.plan.sequences[s];
  worker.ahead.Begin(sequence.queries.count() * problem.group());
  if (key_block + 1 == sequence.keys.count()) {
    worker.ahead.AddHead(problem, worker.batch->next,
                         {&problem.q, &call.args.dout, &call.args.out},
                         {&problem.k, &problem.v}, call.plan.blocks.keys);
    return;
  }
  const TensorRows next = KeyTensorRows(
      problem, call.plan.KeyRows({s, task.kv_heads.begin, key_block + 1}));
  worker.ahead.Add(problem.k, next);
  worker.ahead.Add(problem.v, next);
}

// kKeyOuter, kKeyOuterGroupSplit: one key block of a task.
void ProcessKeyBlock(const BackwardState& call, WorkerBuffers& worker,
                     const KeySplitTask& task, int64_t key_block,
                     Wavefront::Semaphore& semaphore) {
  // Calls run(key block) for all sequences and kv heads of the task.
  const auto for_owned = [&](const auto& run) {
    for (int64_t h = task.kv_heads.begin; h < task.kv_heads.end; ++h) {
      for (int64_t s = task.sequences.begin; s < task.sequences.end; ++s) {
        run(BlockId{s, h, key_block});
      }
    }
  };
  const bool has_all_splits = call.plan.order != LoopOrder::kKeyOuterGroupSplit;
  if (has_all_splits) {
    for_owned([&](const BlockId& id) { PackKeys(call, worker, id); });
  }
  ReadAheadOfKeys(call, worker, task, key_block);
  int64_t step = 0;
  for (int64_t g = task.group_splits.begin; g < task.group_splits.end; ++g) {
    const BlockPairs pairs(call.plan, task, g, {key_block, key_block + 1});
    ProcessPairs(call, worker, task, pairs, &semaphore, step);
    step += pairs.size();
    // The last split's partial is added when it is stored.
    if (g != 0 && g + 1 < task.group_splits.end) {
      for_owned([&](const BlockId& id) { JoinKeyGradients(call, worker, id); });
    }
  }
  semaphore.ReleaseSkipped();
  if (has_all_splits) {
    for_owned([&](const BlockId& id) { StoreKeyGradients(call, worker, id); });
  }
}

void ProcessKeyOuter(const BackwardState& call, const BatchBuffers& batch,
                     Team& team) {
  const KeySplitTask* const tasks =
      call.plan.tasks.data() + batch.heads->items.begin;
  const auto keys_of = [&](int64_t task) {
    return call.plan.sequences[tasks[task].sequences.begin].keys.BlocksOf(
        tasks[task].key_split);
  };
  Wavefront::Counter* counter = batch.counters;
  const auto take_counters = [&counter](int64_t count) {
    Wavefront::Counter* const taken = counter;
    for (int64_t i = 0; i < count; ++i) new (counter++) Wavefront::Counter();
    return taken;
  };
  const int64_t count = batch.heads->items.size();
  for (int64_t t = 0; t < count; ++t) {
    const int64_t items = keys_of(t).size();
    batch.tasks[t] = {items, tasks[t].cost / std::max<double>(1.0, items),
                      take_counters(1), take_counters(items)};
  }
  Wavefront::Run(team, batch.tasks, count,
                 [&](int64_t task, int64_t item, int worker,
                     Wavefront::Semaphore& semaphore) {
                   ProcessKeyBlock(call, call.buffers.worker(worker),
                                   tasks[task], keys_of(task).begin + item,
                                   semaphore);
                 });
}

// kQueryOuter: one kv head of a sequence.
void ProcessQueryOuter(const BackwardState& call, WorkerBuffers& worker,
                       int64_t sequence, int64_t kv_head) {
  const int64_t key_blocks = call.plan.sequences[sequence].keys.count();
  for (int64_t k = 0; k < key_blocks; ++k) {
    PackKeys(call, worker, {sequence, kv_head, k});
  }
  KeySplitTask task;
  task.sequences = {sequence, sequence + 1};
  task.kv_heads = {kv_head, kv_head + 1};
  const BlockPairs pairs(call.plan, task, 0, {0, key_blocks});
  ProcessPairs(call, worker, task, pairs, nullptr, 0);
  for (int64_t k = 0; k < key_blocks; ++k) {
    StoreKeyGradients(call, worker, {sequence, kv_head, k});
  }
}

void ProcessQueryOuter(const BackwardState& call, const BatchBuffers& batch,
                       Team& team) {
  const HeadBatch& heads = *batch.heads;
  team.For(1, [&](int64_t, int worker) {
    for (int64_t s = heads.sequences.begin; s < heads.sequences.end; ++s) {
      for (int64_t h = heads.kv_heads.begin; h < heads.kv_heads.end; ++h) {
        ProcessQueryOuter(call, call.buffers.worker(worker), s, h);
      }
    }
  });
}

// ---- The whole.

// Calls for_queries(worker, block) for all query blocks of a head batch and,
// with kKeyOuterGroupSplit, for_keys(worker, block) for its key blocks, in one
// step. Heads innermost, as in the plan's items: a worker then finds in its
// caches what it packed for its heads.
template <class ForQueries, class ForKeys>
void ForBlocks(const BackwardState& call, const BatchBuffers& batch, Team& team,
               const ForQueries& for_queries, const ForKeys& for_keys) {
  const BackwardPlan& plan = call.plan;
  const Interval kv_heads = batch.heads->kv_heads;
  const int64_t group = call.problem.group();
  const int64_t q_heads = kv_heads.size() * group;
  const Interval query_blocks = plan.QueryBlocks(*batch.heads);
  const Interval key_blocks = plan.order == LoopOrder::kKeyOuterGroupSplit
                                  ? plan.KeyBlocks(*batch.heads)
                                  : Interval();
  const int64_t query_items = query_blocks.size() * q_heads;
  const int64_t key_items = key_blocks.size() * kv_heads.size();
  team.For(query_items + key_items, [&](int64_t item, int worker) {
    if (item < query_items) {
      BlockId id = plan.query_blocks[query_blocks.begin + item / q_heads];
      id.head = kv_heads.begin * group + item % q_heads;
      for_queries(call.buffers.worker(worker), id);
    } else {
      item -= query_items;
      BlockId id = plan.key_blocks[key_blocks.begin + item / kv_heads.size()];
      id.head = kv_heads.begin + item % kv_heads.size();
      for_keys(call.buffers.worker(worker), id);
    }
  });
}

void ProcessHeadBatch(const BackwardState& call, const BatchBuffers& batch,
                      Team& team) {
  if (call.plan.queries_in_turn) return ProcessKeyOuter(call, batch, team);
  ForBlocks(
      call, batch, team,
      [&](WorkerBuffers& w, const BlockId& id) { PackQueries(call, w, id); },
      [&](WorkerBuffers& w, const BlockId& id) { PackKeys(call, w, id); });

  if (call.plan.order == LoopOrder::kQueryOuter) {
    ProcessQueryOuter(call, batch, team);
  } else {
    ProcessKeyOuter(call, batch, team);
  }

  if (!call.args.dq.given() &&
      call.plan.order != LoopOrder::kKeyOuterGroupSplit) {
    return;
  }
  ForBlocks(
      call, batch, team,
      [&](WorkerBuffers& w, const BlockId& id) {
        if (call.args.dq.given()) StoreQueryGradient(call, w, id);
      },
      [&](WorkerBuffers& w, const BlockId& id) {
        StoreKeyGradients(call, w, id);
      });
}

// A non-finite row of Q or dO reaches the dK or dV of every key it sees, one of
// K the dQ of every query that sees it.
void SpreadNonFinite(const BackwardState& call, Team& team) {
  const Problem& problem = call.problem;
  const AttentionBackwardArgs& args = call.args;
  if (args.dk.given() && call.buffers.AnyQNonFinite()) {
    SpreadFromQueries(problem, problem.q, args.dk, NonFinite::kBecomesNaN,
                      team);
  }
  if (args.dv.given() && call.buffers.AnyDoutNonFinite()) {
    SpreadFromQueries(problem, args.dout, args.dv, NonFinite::kIsAdded, team);
  }
  if (args.dq.given() && call.buffers.AnyKNonFinite()) {
    SpreadFromKeys(problem, problem.k, args.dq, NonFinite::kBecomesNaN, team);
  }
}

struct BackwardPass {
  using Args = AttentionBackwardArgs;
  using Plan = BackwardPlan;
  using Use = BackwardUse;
  using State = BackwardState;
  static constexpr const char* kName = "attention_backward";
  // S, dP, dV, dQ and dK.
  static int64_t Depth(const Problem& problem) {
    return 3 * problem.head_dim + 2 * problem.value_dim;
  }
  static Status Check(const Args& args, Problem* problem) {
    return CheckBackward(args, problem);
  }
  static Use UseOf(const Args& args, const Problem& problem,
                   const simd::Engine& engine, int threads) {
    const BiasGradientUse dbias =
        UseOfBiasGradient(args.dbias, problem, engine);
    Use use;
    use.share_batch = dbias.shares_batch;
    use.share_heads = dbias.shares_heads;
    use.sum_blocks = dbias.has_elements;
    use.fixed_blocks = dbias.sums_blocks || args.dalibi_slopes.given();
    use.threads = threads;
    return use;
  }
  static void MakePlan(const Problem& problem, const simd::Engine& engine,
                       const Use& use, Plan* plan) {
    PlanBackward(problem, engine, use, plan);
  }
  static bool IsOneStep(const Problem& problem, const Plan& plan) {
    return plan.head_batches.alone && BiasTiles::ScannedByLeader(problem);
  }
  static void Execute(BackwardState& call, Team& team) {
    call.buffers.Clear();
    call.buffers.bias_tiles.Scan(team);
    ForEachHeadBatch(call.plan.head_batches, team, call.buffers.batches(),
                     [&](Team& of_batch, const BatchBuffers& batch) {
                       ProcessHeadBatch(call, batch, of_batch);
                     });
    call.buffers.bias_sums.Store(team);
    call.buffers.small.Store([&call](int64_t sequence) {
      return call.plan.sequences[sequence].keys.count();
    });
    SpreadNonFinite(call, team);
  }
};

using BackwardCall = PassCall<BackwardPass, FewQueriesBackward>;

// Calls function(what of the arguments is used): out, which delta makes
// needless, is unchecked then and may be anything.
template <class Function>
Status WithUsed(const AttentionBackwardArgs& args, const Function& function) {
  if (!args.delta.given() || !args.out.given()) return function(args);
  AttentionBackwardArgs used = args;
  used.out = ConstTensorView();
  return function(used);
}

}  // namespace
}  // namespace attention

Status AttentionBackward(const AttentionBackwardArgs& args, Context* context) {
  return attention::WithUsed(args, [&](const AttentionBackwardArgs& used) {
    return attention::BackwardCall::Run(used, context);
  });
}

Status AttentionBackwardWorkspace(const AttentionBackwardArgs& args,
                                  size_t* bytes, Context* context) {
  return attention::WithUsed(args, [&](const AttentionBackwardArgs& used) {
    return attention::BackwardCall::Workspace(used, bytes, context);
  });
}

}  // namespace fa2
