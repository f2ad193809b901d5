// SPDX-License-Identifier: Apache-2.0

// FlashAttention-2 forward (Dao 2023, algorithm 1). For each batch of heads:
//
//   preprocess  pack K and V once a kv head
//   main loop   blocks of queries of each head, in parallel; for each key block
//               that one sees
//                 S^T = K Q^T, running maximum m and sum l, P = exp(S - m),
//                 O^T = O^T exp(m_old - m) + V^T P^T
//   epilogue    O / l and lse = m + log l of the block, stored
#include <algorithm>
#include <limits>

#include "src/attention/call/pass_call.h"
#include "src/attention/few_queries/few_forward.h"
#include "src/attention/forward/buffers.h"
#include "src/attention/schedule/head_batch_loop.h"
#include "src/attention/scores/non_finite.h"

namespace fa2 {
namespace attention {
namespace {

using simd::Role;
using threading::Team;

// ---- Preprocess.

// Whether a block mask lets any query see a block of keys.
bool AnyListed(const ForwardState& call, const BlockRows& keys) {
  return call.problem.AnyListed(call.problem.sequences[keys.sequence],
                                keys.head, keys.rows);
}

void PackK(const ForwardState& call, const ForwardWorker& worker,
           const BlockId& id) {
  const BlockRows keys = call.plan.sequences[id.sequence].keys.Rows(id);
  if (!AnyListed(call, keys)) return;
  const simd::Rows k =
      worker.rows.Read(call.problem.k, KeyTensorRows(call.problem, keys));
  if (!call.plan.k_as_it_lies) {
    call.engine.pack(Role::kScoreLeft, k, keys.padded, false,
                     worker.batch->K(id));
  }
  call.buffers.alibi_reach.SeeKeys(keys, k);
}

void PackV(const ForwardState& call, const ForwardWorker& worker,
           const BlockId& id) {
  const BlockRows keys = call.plan.sequences[id.sequence].keys.Rows(id);
  if (!AnyListed(call, keys)) return;
  const simd::Rows v =
      worker.rows.Read(call.problem.v, KeyTensorRows(call.problem, keys));
  std::byte* const packed = worker.batch->V(id);
  const bool finite =
      call.engine.pack(Role::kGradLeft, v, keys.padded, false, packed);
  if (finite) return;
  call.engine.pack(Role::kGradLeft, v, keys.padded, true, packed);
  call.buffers.VNonFinite(id) = 1;
}

// A block of keys in turn: as it lies where it may, else packed.
void TakeKeysInTurn(const ForwardState& call, const ForwardWorker& worker,
                    const BlockId& id, simd::ForwardBlock* block) {
  block->k_score = worker.batch->K(id);
  block->v_grad = worker.batch->V(id);
  block->k_stride = 0;
  block->v_stride = 0;
  const TensorRows at = KeyTensorRows(
      call.problem, call.plan.sequences[id.sequence].keys.Rows(id));
  if (call.plan.keys_as_they_lie) {
    const simd::Rows k = worker.rows.Read(call.problem.k, at);
    block->k_score = k.data;
    block->k_stride = k.stride;
    const simd::Rows v = worker.rows.Read(call.problem.v, at);
    if (call.engine.pack(Role::kGradLeft, v, v.rows, false, nullptr)) {
      block->v_grad = v.data;
      block->v_stride = v.stride;
      return;
    }
  } else {
    PackK(call, worker, id);
  }
  PackV(call, worker, id);
}

// ---- Main loop.

void AddNextHead(const ForwardState& call, const ForwardBatch& batch,
                 ReadAhead* ahead) {
  const Problem& problem = call.problem;
  ahead->AddHead(problem, batch.next, {&problem.q}, {&problem.k, &problem.v},
                 call.plan.keys_ahead);
}

// With keys in turn: what is packed after a block of keys is computed. Rows
// that are taken as they lie are not asked for: they come as fast by
// themselves, and a prefetch of what L2 has costs 3 to 4 cycles a line (f32 on
// AMX machines, 32 to 64 queries: 0.86 to 0.93 of the time without).
void ReadAheadOfKeys(const ForwardState& call, ForwardWorker& worker,
                     const BlockId& keys) {
  if (call.plan.keys_as_they_lie) return;
  worker.ahead.Begin(1);
  const Blocks& blocks = call.plan.sequences[keys.sequence].keys;
  if (keys.block + 1 == blocks.count()) {
    AddNextHead(call, *worker.batch, &worker.ahead);
    return;
  }
  const TensorRows next = KeyTensorRows(
      call.problem, blocks.Rows({keys.sequence, keys.head, keys.block + 1}));
  worker.ahead.Add(call.problem.k, next);
  worker.ahead.Add(call.problem.v, next);
}

// Beside the first item of a head batch's.
void ReadAheadOfHead(const ForwardState& call, const ForwardBatch& batch,
                     int64_t pairs, ForwardWorker& worker) {
  if (batch.next == nullptr || call.plan.keys_in_turn) return;
  worker.ahead.Begin(pairs);
  AddNextHead(call, batch, &worker.ahead);
}

// The block pair whose bias is prefetched beside the products of these keys.
PairRows PairAfter(const ForwardSequence& s, const BlockRows& queries,
                   const BlockId& keys) {
  if (keys.block + 1 >= s.keys.count()) return {};
  return {queries, s.keys.Rows({keys.sequence, keys.head, keys.block + 1})};
}

// Packs a block's queries and says how far ALiBi lets them see.
void PackQueries(const ForwardState& call, const ForwardWorker& worker,
                 const BlockRows& queries) {
  const AlibiReach& reach = call.buffers.alibi_reach;
  const simd::Rows q =
      worker.rows.Read(call.problem.q, QueryTensorRows(call.problem, queries));
  call.engine.pack(Role::kScoreRight, q, queries.padded, false, worker.q_score);
  reach.SeeQueries(queries, q);
  const Interval own = reach.OwnKeys(queries);
  simd::Rows own_keys;
  if (!own.empty()) {
    const int64_t kv_head = queries.head / call.problem.group();
    own_keys = worker.rows.Read(
        call.problem.k,
        KeyTensorRows(call.problem, {queries.sequence, kv_head, own, 0}), 1);
  }
  reach.BoundByNearestKey(queries, q, own_keys);
}

template <typename T>
void ClearRowStateAs(const ForwardWorker& worker, int64_t rows) {
  std::fill_n(reinterpret_cast<T*>(worker.row_max), rows,
              -std::numeric_limits<T>::infinity());
  for (std::byte* sum : {worker.row_sum, worker.row_weight}) {
    std::fill_n(reinterpret_cast<T*>(sum), rows, T(0));
  }
}

// Rows that have seen no key: maximum -inf, sums 0.
void ClearRowState(const ForwardState& call, const ForwardWorker& worker,
                   int64_t rows) {
  if (call.engine.accumulator == DType::kF64) {
    ClearRowStateAs<double>(worker, rows);
  } else {
    ClearRowStateAs<float>(worker, rows);
  }
}

// Attends to all key blocks that the queries see. Returns whether there were
// any.
bool ProcessPairs(const ForwardState& call, ForwardWorker& worker,
                  const BlockId& id, const BlockRows& queries) {
  const ForwardSequence& s = call.plan.sequences[id.sequence];
  const int64_t kv_head = id.head / call.problem.group();
  const Interval seen =
      call.problem.sequences[id.sequence].mask.KeysOf(queries.rows);
  simd::ForwardBlock block;
  bool outgrown = false;
  block.outgrown = &outgrown;
  block.first = true;
  for (int64_t b = seen.begin / s.keys.size;
       b < s.keys.count() && b * s.keys.size < seen.end; ++b) {
    const BlockId keys = {id.sequence, kv_head, b};
    const PairRows pair = {queries, s.keys.Rows(keys)};
    if (!worker.scores.Prepare(pair, PairAfter(s, queries, keys), &block)) {
      continue;
    }
    if (call.plan.keys_in_turn) {
      TakeKeysInTurn(call, worker, keys, &block);
      ReadAheadOfKeys(call, worker, keys);
    } else {
      block.k_score = worker.batch->K(keys);
      block.v_grad = worker.batch->V(keys);
      if (call.plan.k_as_it_lies) {
        const simd::Rows k = worker.rows.Read(
            call.problem.k, KeyTensorRows(call.problem, pair.keys));
        block.k_score = k.data;
        block.k_stride = k.stride;
      }
    }
    worker.ahead.TakeShare(&block.ahead);
    block.scratch = worker.engine_scratch;
    block.q_score = worker.q_score;
    block.row_max = worker.row_max;
    block.row_sum = worker.row_sum;
    if (call.engine.rounds_probabilities) block.row_weight = worker.row_weight;
    block.out = worker.out;
    if (block.first) ClearRowState(call, worker, queries.padded);
    call.engine.forward(block);
    block.first = false;
  }
  return !block.first;
}

// ---- Epilogue.

// What rows of O are multiplied with is left in row_weight.
void StoreOut(const ForwardState& call, const ForwardWorker& worker,
              const BlockRows& queries, bool any) {
  if (!any) ClearRowState(call, worker, queries.padded);
  FinishRows(call.row_kernels, call.problem, call.args.lse, queries.sequence,
             queries.head, queries.rows, worker.row_max, worker.row_sum,
             worker.row_weight);
  AccumulatorSum out = {AccumulatorSum::Kind::kQueries, queries.padded};
  if (any) out.Add(worker.out);
  const double dropout =
      call.engine.dropout_bits ? call.problem.dropout_scale : 1.0;
  worker.rows.Store(out, {dropout, worker.row_weight},
                    {call.args.out, QueryTensorRows(call.problem, queries)});
}

// ---- The whole.

void ProcessQueryBlock(const ForwardState& call, ForwardWorker& worker,
                       const BlockId& id) {
  const BlockRows queries = call.plan.sequences[id.sequence].queries.Rows(id);
  const Sequence& s = call.problem.sequences[id.sequence];
  bool any = call.problem.AnyListed(s, id.head, queries.rows, {0, s.nk()});
  if (any) {
    PackQueries(call, worker, queries);
    any = ProcessPairs(call, worker, id, queries);
  }
  StoreOut(call, worker, queries, any);
}

void ProcessHeadBatch(const ForwardState& call, const ForwardBatch& batch,
                      Team& team) {
  const HeadBatch& heads = *batch.heads;
  // Heads innermost, as in the plan's items: a worker then finds in its caches
  // what it packed for its heads.
  const Interval blocks = call.plan.KeyBlocks(heads);
  const int64_t kv_heads = heads.kv_heads.size();
  const int64_t count = blocks.size() * kv_heads;
  const int64_t packed = call.plan.keys_in_turn ? 0 : 2 * count;
  team.For(packed, [&](int64_t item, int worker) {
    BlockId id = call.plan.key_blocks[blocks.begin + item % count / kv_heads];
    id.head = heads.kv_heads.begin + item % kv_heads;
    (item < count ? PackK : PackV)(call, call.buffers.worker(worker), id);
  });
  team.For(heads.items.size(), [&](int64_t item, int worker) {
    ForwardWorker& buffers = call.buffers.worker(worker);
    if (item == 0) {
      ReadAheadOfHead(call, batch, heads.items.size() * blocks.size(), buffers);
    }
    ProcessQueryBlock(call, buffers,
                      call.plan.items[heads.items.begin + item].queries);
  });
}

struct ForwardPass {
  using Args = AttentionForwardArgs;
  using Plan = ForwardPlan;
  using Use = int;  // threads
  using State = ForwardState;
  static constexpr const char* kName = "attention_forward";
  static int64_t Depth(const Problem& problem) {
    return problem.head_dim + problem.value_dim;
  }
  static Status Check(const Args& args, Problem* problem) {
    return CheckForward(args, problem);
  }
  static Use UseOf(const Args& /*args*/, const Problem& /*problem*/,
                   const simd::Engine& /*engine*/, int threads) {
    return threads;
  }
  static void MakePlan(const Problem& problem, const simd::Engine& engine,
                       Use threads, Plan* plan) {
    PlanForward(problem, engine, threads, plan);
  }
  static bool IsOneStep(const Problem& problem, const Plan& plan) {
    return plan.head_batches.alone && BiasTiles::ScannedByLeader(problem);
  }
  static void Execute(ForwardState& call, Team& team) {
    call.buffers.Clear();
    call.buffers.bias_tiles.Scan(team);
    ForEachHeadBatch(call.plan.head_batches, team, call.buffers.batches(),
                     [&](Team& of_batch, const ForwardBatch& batch) {
                       ProcessHeadBatch(call, batch, of_batch);
                     });
    if (call.buffers.AnyVNonFinite()) {
      SpreadFromKeys(call.problem, call.problem.v, call.args.out,
                     NonFinite::kIsAdded, team);
    }
  }
};

using ForwardCall = PassCall<ForwardPass, FewQueriesForward>;

}  // namespace
}  // namespace attention

Status AttentionForward(const AttentionForwardArgs& args, Context* context) {
  return attention::ForwardCall::Run(args, context);
}

Status AttentionForwardWorkspace(const AttentionForwardArgs& args,
                                 size_t* bytes, Context* context) {
  return attention::ForwardCall::Workspace(args, bytes, context);
}

}  // namespace fa2
