// SPDX-License-Identifier: Apache-2.0
#include "src/attention/backward/buffers.h"

#include <algorithm>
#include <cstring>

#include "src/attention/schedule/head_batch_loop.h"

namespace fa2::attention {

KeyArrays::KeyArrays(const BackwardInputs& inputs, int64_t rows, int64_t heads,
                     threading::ScratchLayout* layout) {
  const simd::Engine& engine = inputs.engine;
  const int64_t d = inputs.problem.head_dim;
  const int64_t dv_depth = inputs.problem.value_dim;
  const auto packed = [&](bool wanted, simd::Role role, int64_t depth) {
    return layout->Take(wanted ? engine.packed_bytes(role, rows * heads, depth)
                               : 0);
  };
  const auto partials = [&](bool wanted, int64_t depth) {
    return layout->Take(
        wanted ? engine.key_accumulator_bytes(
                     rows * heads * inputs.plan.dkv_partials(), depth)
               : 0);
  };
  k_score = packed(true, simd::Role::kScoreLeft, d);
  k_grad = engine.grad_left_is_score_left
               ? k_score
               : packed(inputs.args.dq.given(), simd::Role::kGradLeft, d);
  v_score = packed(true, simd::Role::kScoreLeft, dv_depth);
  dk = partials(inputs.args.dk.given(), d);
  dv = partials(inputs.args.dv.given(), dv_depth);
}

BatchBuffers::BatchBuffers(const BackwardBuffers& call,
                           threading::ScratchLayout* layout) {
  const BackwardInputs& in = call.in;
  const auto& largest = in.plan.largest_batch;
  const int64_t heads =
      in.plan.queries_in_turn ? 1 : largest.heads * in.problem.group();
  const int64_t rows = largest.q_rows * heads;
  const int64_t d = in.problem.head_dim;
  const int64_t dv = in.problem.value_dim;
  const auto packed = [&](bool wanted, simd::Role role, int64_t depth) {
    return layout->Take(wanted ? in.engine.packed_bytes(role, rows, depth) : 0);
  };
  q_score = packed(true, simd::Role::kScoreRight, d);
  q_grad = packed(in.args.dk.given(), simd::Role::kGradRight, d);
  dout_score = packed(true, simd::Role::kScoreRight, dv);
  dout_grad = packed(in.args.dv.given(), simd::Role::kGradRight, dv);
  const size_t statistics = static_cast<size_t>(rows) * in.element();
  lse = layout->Take(statistics);
  delta = layout->Take(statistics);
  dq = layout->Take(in.args.dq.given() ? in.engine.query_accumulator_bytes(
                                             largest.dq_rows * heads, d)
                                       : 0);
  keys = KeyArrays(in, in.plan.keys_in_batch ? largest.k_rows : 0,
                   largest.heads, layout);
  tasks = layout->Take<threading::Wavefront::Task>(
      static_cast<size_t>(largest.tasks));
  counters = layout->Take<threading::Wavefront::Counter>(
      static_cast<size_t>(largest.tasks + largest.items));
}

WorkerBuffers::WorkerBuffers(const BackwardBuffers& call,
                             threading::ScratchLayout* layout)
    : scores(call.in.problem, call.in.engine, call.in.staging, call.bias_tiles,
             call.alibi_reach, call.in.plan.blocks,
             call.in.args.dalibi_slopes.given(), layout),
      rows({call.in.problem.q, call.in.problem.k, call.in.problem.v,
            call.in.args.out, call.in.args.dout, call.in.args.dq,
            call.in.args.dk, call.in.args.dv},
           CachesLeft({call.in.args.dq, call.in.args.dk, call.in.args.dv},
                      call.in.plan.workers),
           call.in.engine, call.in.row_kernels,
           std::max(call.in.plan.blocks.keys, call.in.plan.blocks.queries),
           layout),
      bias(call.in, call.bias_sums, layout),
      engine_scratch(layout->Take(call.in.engine.backward_scratch_bytes(
          call.in.plan.blocks, call.in.problem.head_dim,
          call.in.problem.value_dim))),
      in_(call.in),
      call_(call),
      keys_(call.in, call.in.plan.keys_in_batch ? 0 : call.in.plan.blocks.keys,
            1, layout) {
  k_finite = layout->Take(
      in_.args.dq.given() && in_.engine.grad_left_is_score_left
          ? in_.engine.packed_bytes(simd::Role::kGradLeft, in_.plan.blocks.keys,
                                    in_.problem.head_dim)
          : 0);
}

QueryOperands WorkerBuffers::Queries(const BlockId& queries) const {
  const BackwardSequence& s = in_.plan.sequences[queries.sequence];
  const int64_t head =
      queries.head - batch->heads->kv_heads.begin * in_.problem.group();
  const int64_t row = in_.plan.queries_in_turn
                          ? 0
                          : head * in_.plan.largest_batch.q_rows +
                                s.batch_q_row +
                                s.queries.Block(queries.block).begin;
  const auto packed = [&](std::byte* base, simd::Role role, int64_t depth) {
    return base + in_.engine.packed_bytes(role, row, depth);
  };
  const int64_t d = in_.problem.head_dim;
  const int64_t dv = in_.problem.value_dim;
  return {packed(batch->q_score, simd::Role::kScoreRight, d),
          packed(batch->q_grad, simd::Role::kGradRight, d),
          packed(batch->dout_score, simd::Role::kScoreRight, dv),
          packed(batch->dout_grad, simd::Role::kGradRight, dv),
          batch->lse + static_cast<size_t>(row) * in_.element(),
          batch->delta + static_cast<size_t>(row) * in_.element()};
}

KeyOperands WorkerBuffers::Keys(const BlockId& keys) const {
  const BackwardPlan& plan = in_.plan;
  const KeyArrays& arrays = plan.keys_in_batch ? batch->keys : keys_;
  int64_t row = 0;
  if (plan.keys_in_batch) {
    const BackwardSequence& s = plan.sequences[keys.sequence];
    row =
        (keys.head - batch->heads->kv_heads.begin) * plan.largest_batch.k_rows +
        s.batch_k_row + s.keys.Block(keys.block).begin;
  }
  const auto packed = [&](std::byte* base, simd::Role role, int64_t depth) {
    return base + in_.engine.packed_bytes(role, row, depth);
  };
  const int64_t d = in_.problem.head_dim;
  return {
      packed(arrays.k_score, simd::Role::kScoreLeft, d),
      packed(arrays.k_grad, simd::Role::kGradLeft, d),
      packed(arrays.v_score, simd::Role::kScoreLeft, in_.problem.value_dim)};
}

DqAccum WorkerBuffers::Dq(const BlockId& queries, int64_t key_split) const {
  const BackwardSequence& s = in_.plan.sequences[queries.sequence];
  const int64_t head =
      queries.head - batch->heads->kv_heads.begin * in_.problem.group();
  const int64_t row = in_.plan.queries_in_turn
                          ? 0
                          : head * in_.plan.largest_batch.dq_rows +
                                s.batch_dq_row +
                                key_split * s.queries.padded() +
                                s.queries.Block(queries.block).begin;
  return {
      batch->dq + in_.engine.query_accumulator_bytes(row, in_.problem.head_dim),
      call_.DqTouched(queries, key_split)};
}

DkvAccum WorkerBuffers::Dkv(const BlockId& keys, int64_t partial) const {
  const BackwardPlan& plan = in_.plan;
  const KeyArrays& arrays = plan.keys_in_batch ? batch->keys : keys_;
  int64_t row = partial * plan.blocks.keys;
  if (plan.keys_in_batch) {
    const BackwardSequence& s = plan.sequences[keys.sequence];
    const int64_t head = keys.head - batch->heads->kv_heads.begin;
    row = (head * plan.dkv_partials() + partial) * plan.largest_batch.k_rows +
          s.batch_k_row + s.keys.Block(keys.block).begin;
  }
  return {
      arrays.dk + in_.engine.key_accumulator_bytes(row, in_.problem.head_dim),
      arrays.dv + in_.engine.key_accumulator_bytes(row, in_.problem.value_dim),
      call_.DkvTouched(keys, partial)};
}

BackwardBuffers::BackwardBuffers(const BackwardInputs& inputs,
                                 threading::ScratchLayout* layout)
    : in(inputs),
      bias_tiles(in.problem, in.args.dbias.given(), in.targets, layout),
      alibi_reach(in.problem, in.row_kernels, layout),
      bias_sums(in, layout),
      small(in.args, in.problem,
            PanelsBefore(in.plan.q_rows,
                         static_cast<int64_t>(in.plan.sequences.size()),
                         simd::kTileQueries),
            in.plan.k_blocks, layout) {
  const BackwardPlan& plan = in.plan;
  const size_t q_heads = static_cast<size_t>(in.problem.q_heads);
  const size_t kv_heads = static_cast<size_t>(in.problem.kv_heads);
  const size_t q_blocks = static_cast<size_t>(plan.q_blocks) * q_heads;
  const size_t k_blocks = static_cast<size_t>(plan.k_blocks) * kv_heads;
  dq_touched_ =
      layout->Take<uint8_t>(static_cast<size_t>(plan.dq_blocks) * q_heads);
  dkv_touched_ = layout->Take<uint8_t>(
      k_blocks * static_cast<size_t>(plan.dkv_partials()));
  q_non_finite_ = layout->Take<uint8_t>(q_blocks);
  dout_non_finite_ = layout->Take<uint8_t>(q_blocks);
  k_non_finite_ = layout->Take<uint8_t>(k_blocks);
  batches_ = layout->Construct<BatchBuffers>(
      plan.head_batches.in_flight(plan.workers), *this);
  workers_ = layout->Construct<WorkerBuffers>(plan.workers, *this);
  AssignBatchScratch(plan.head_batches, batches_, plan.workers, workers_);
}

void BackwardBuffers::Clear() const {
  const auto clear = [](uint8_t* flags, int64_t blocks, int64_t heads) {
    memset(flags, 0, static_cast<size_t>(blocks * heads));
  };
  clear(dq_touched_, in.plan.dq_blocks, in.problem.q_heads);
  clear(dkv_touched_, in.plan.k_blocks * in.plan.dkv_partials(),
        in.problem.kv_heads);
  clear(q_non_finite_, in.plan.q_blocks, in.problem.q_heads);
  clear(dout_non_finite_, in.plan.q_blocks, in.problem.q_heads);
  clear(k_non_finite_, in.plan.k_blocks, in.problem.kv_heads);
  bias_sums.Clear();
  small.Clear();
}

int64_t BackwardBuffers::QueryFlag(const BlockId& queries) const {
  return queries.head * in.plan.q_blocks +
         in.plan.sequences[queries.sequence].q_block + queries.block;
}

int64_t BackwardBuffers::KeyFlag(const BlockId& keys) const {
  return keys.head * in.plan.k_blocks +
         in.plan.sequences[keys.sequence].k_block + keys.block;
}

uint8_t* BackwardBuffers::DqTouched(const BlockId& queries,
                                    int64_t key_split) const {
  const BackwardSequence& s = in.plan.sequences[queries.sequence];
  return dq_touched_ + queries.head * in.plan.dq_blocks + s.dq_block +
         key_split * s.queries.count() + queries.block;
}

uint8_t* BackwardBuffers::DkvTouched(const BlockId& keys,
                                     int64_t partial) const {
  return dkv_touched_ + KeyFlag(keys) * in.plan.dkv_partials() + partial;
}

namespace {

bool Any(const uint8_t* flags, int64_t count) {
  return std::any_of(flags, flags + count, [](uint8_t f) { return f != 0; });
}

}  // namespace

bool BackwardBuffers::AnyQNonFinite() const {
  return Any(q_non_finite_, in.plan.q_blocks * in.problem.q_heads);
}
bool BackwardBuffers::AnyDoutNonFinite() const {
  return Any(dout_non_finite_, in.plan.q_blocks * in.problem.q_heads);
}
bool BackwardBuffers::AnyKNonFinite() const {
  return Any(k_non_finite_, in.plan.k_blocks * in.problem.kv_heads);
}

}  // namespace fa2::attention
