// SPDX-License-Identifier: Apache-2.0
#include "src/attention/forward/buffers.h"

#include <algorithm>

#include "src/attention/schedule/head_batch_loop.h"

namespace fa2::attention {

ForwardBatch::ForwardBatch(const ForwardBuffers& call,
                           threading::ScratchLayout* layout)
    : in_(call.in) {
  const int64_t rows =
      in_.plan.largest_batch.k_rows * in_.plan.largest_batch.heads;
  k_score_ = layout->Take(in_.engine.packed_bytes(simd::Role::kScoreLeft, rows,
                                                  in_.problem.head_dim));
  v_grad_ = layout->Take(in_.engine.packed_bytes(simd::Role::kGradLeft, rows,
                                                 in_.problem.value_dim));
}

int64_t ForwardBatch::Row(const BlockId& keys) const {
  if (in_.plan.keys_in_turn) return 0;
  const ForwardSequence& s = in_.plan.sequences[keys.sequence];
  return (keys.head - heads->kv_heads.begin) * in_.plan.largest_batch.k_rows +
         s.batch_k_row + s.keys.Block(keys.block).begin;
}

std::byte* ForwardBatch::K(const BlockId& keys) const {
  return k_score_ + in_.engine.packed_bytes(simd::Role::kScoreLeft, Row(keys),
                                            in_.problem.head_dim);
}

std::byte* ForwardBatch::V(const BlockId& keys) const {
  return v_grad_ + in_.engine.packed_bytes(simd::Role::kGradLeft, Row(keys),
                                           in_.problem.value_dim);
}

ForwardWorker::ForwardWorker(const ForwardBuffers& call,
                             threading::ScratchLayout* layout)
    : scores(call.in.problem, call.in.engine, call.in.staging, call.bias_tiles,
             call.alibi_reach, call.in.plan.blocks,
             /*want_alibi_gradient=*/false, layout),
      rows({call.in.problem.q, call.in.problem.k, call.in.problem.v,
            call.in.args.out},
           CachesLeft({call.in.args.out}, call.in.plan.workers), call.in.engine,
           call.in.row_kernels,
           std::max(call.in.plan.blocks.keys, call.in.plan.blocks.queries),
           layout) {
  const simd::Engine& engine = call.in.engine;
  const simd::BlockSizes& blocks = call.in.plan.blocks;
  const int64_t d = call.in.problem.head_dim;
  const int64_t dv = call.in.problem.value_dim;
  q_score = layout->Take(
      engine.packed_bytes(simd::Role::kScoreRight, blocks.queries, d));
  engine_scratch = layout->Take(engine.forward_scratch_bytes(blocks, d, dv));
  out = layout->Take(engine.query_accumulator_bytes(blocks.queries, dv));
  const size_t row = static_cast<size_t>(blocks.queries) * call.in.element();
  row_max = layout->Take(row);
  row_sum = layout->Take(row);
  row_weight = engine.rounds_probabilities ? layout->Take(row) : row_sum;
}

ForwardBuffers::ForwardBuffers(const ForwardInputs& inputs,
                               threading::ScratchLayout* layout)
    : in(inputs),
      bias_tiles(in.problem, /*wants_gradient=*/false, in.targets, layout),
      alibi_reach(in.problem, in.row_kernels, layout) {
  v_non_finite_ = layout->Take<uint8_t>(
      static_cast<size_t>(in.plan.k_blocks * in.problem.kv_heads));
  batches_ = layout->Construct<ForwardBatch>(
      in.plan.head_batches.in_flight(in.plan.workers), *this);
  workers_ = layout->Construct<ForwardWorker>(in.plan.workers, *this);
  AssignBatchScratch(in.plan.head_batches, batches_, in.plan.workers, workers_);
}

void ForwardBuffers::Clear() const {
  std::fill_n(v_non_finite_, in.plan.k_blocks * in.problem.kv_heads,
              uint8_t{0});
}

uint8_t& ForwardBuffers::VNonFinite(const BlockId& keys) const {
  return v_non_finite_[keys.head * in.plan.k_blocks +
                       in.plan.sequences[keys.sequence].k_block + keys.block];
}

bool ForwardBuffers::AnyVNonFinite() const {
  const int64_t count = in.plan.k_blocks * in.problem.kv_heads;
  return std::any_of(v_non_finite_, v_non_finite_ + count,
                     [](uint8_t f) { return f != 0; });
}

}  // namespace fa2::attention
