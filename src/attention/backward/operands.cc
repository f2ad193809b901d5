// SPDX-License-Identifier: Apache-2.0
#include "src/attention/backward/operands.h"

#include "src/attention/backward/row_statistics.h"

namespace fa2::attention {
namespace {

using simd::Role;

// Packs rows for their role in scores and, if wanted, for that in a gradient,
// which gets zeros for NaN and infinity. Returns whether there are any of
// these.
bool Pack(const simd::Engine& engine, const simd::Rows& rows, int64_t padded,
          Role score, std::byte* packed_score, Role grad, bool want_grad,
          std::byte* packed_grad) {
  const bool pair = want_grad && engine.pack_pair != nullptr;
  const bool finite =
      pair ? engine.pack_pair(score, grad, rows, padded, packed_score,
                              packed_grad)
           : engine.pack(score, rows, padded, false, packed_score);
  if (want_grad && !(pair && finite)) {
    engine.pack(grad, rows, padded, !finite, packed_grad);
  }
  return !finite;
}

// K as dQ takes it: without NaN and infinity.
const std::byte* GradientKeys(const BackwardState& call,
                              const WorkerBuffers& worker, const BlockId& id,
                              const KeyOperands& packed) {
  if (!call.engine.grad_left_is_score_left ||
      call.buffers.KNonFinite(id) == 0) {
    return packed.k_grad;
  }
  const BlockRows keys = call.plan.KeyRows(id);
  call.engine.pack(
      Role::kGradLeft,
      worker.rows.Read(call.problem.k, KeyTensorRows(call.problem, keys)),
      keys.padded, true, worker.k_finite);
  return worker.k_finite;
}

}  // namespace

void PackQueries(const BackwardState& call, const WorkerBuffers& worker,
                 const BlockId& id) {
  const BlockRows queries = call.plan.QueryRows(id);
  const TensorRows at = QueryTensorRows(call.problem, queries);
  const QueryOperands to = worker.Queries(id);
  const AlibiReach& reach = call.buffers.alibi_reach;

  const Sequence& s = call.problem.sequences[id.sequence];
  if (!call.problem.AnyListed(s, id.head, queries.rows, {0, s.nk()})) {
    PrepareRowStatistics(call, worker, queries, to);
    return;
  }

  const simd::Rows q = worker.rows.Read(call.problem.q, at);
  const bool q_non_finite =
      Pack(call.engine, q, queries.padded, Role::kScoreRight, to.q_score,
           Role::kGradRight, call.args.dk.given(), to.q_grad);
  if (q_non_finite) call.buffers.QNonFinite(id) = 1;
  reach.SeeQueries(queries, q);

  const simd::Rows dout = worker.rows.Read(call.args.dout, at);
  const bool dout_non_finite =
      Pack(call.engine, dout, queries.padded, Role::kScoreRight, to.dout_score,
           Role::kGradRight, call.args.dv.given(), to.dout_grad);
  if (dout_non_finite) call.buffers.DoutNonFinite(id) = 1;

  PrepareRowStatistics(call, worker, queries, to);
  reach.BoundByStatistics(queries, to.lse, to.delta);
}

void PackKeys(const BackwardState& call, const WorkerBuffers& worker,
              const BlockId& id) {
  const BlockRows keys = call.plan.KeyRows(id);
  const TensorRows at = KeyTensorRows(call.problem, keys);
  const KeyOperands to = worker.Keys(id);

  if (!call.problem.AnyListed(call.problem.sequences[id.sequence], id.head,
                              keys.rows)) {
    return;
  }
  const simd::Rows k = worker.rows.Read(call.problem.k, at);
  call.buffers.alibi_reach.SeeKeys(keys, k);
  const bool as_they_lie = call.plan.keys_as_they_lie;  // only looked at
  const bool want_grad =
      call.args.dq.given() && !call.engine.grad_left_is_score_left;
  const bool non_finite = Pack(call.engine, k, keys.padded, Role::kScoreLeft,
                               as_they_lie ? nullptr : to.k_score,
                               Role::kGradLeft, want_grad, to.k_grad);
  if (non_finite) call.buffers.KNonFinite(id) = 1;
  if (as_they_lie) return;

  const simd::Rows v = worker.rows.Read(call.problem.v, at);
  call.engine.pack(Role::kScoreLeft, v, keys.padded, false, to.v_score);
}

void TakeKeys(const BackwardState& call, const WorkerBuffers& worker,
              const BlockId& id, simd::BackwardBlock* block) {
  const KeyOperands packed = worker.Keys(id);
  block->k_score = packed.k_score;
  block->v_score = packed.v_score;
  block->k_grad = call.args.dq.given() ? GradientKeys(call, worker, id, packed)
                                       : packed.k_grad;
  if (!call.plan.keys_as_they_lie) return;
  const TensorRows at = KeyTensorRows(call.problem, call.plan.KeyRows(id));
  const simd::Rows k = worker.rows.Read(call.problem.k, at);
  const simd::Rows v = worker.rows.Read(call.problem.v, at);
  block->k_score = k.data;
  block->k_score_stride = k.stride;
  block->v_score = v.data;
  block->v_score_stride = v.stride;
  if (call.buffers.KNonFinite(id) == 0) {
    block->k_grad = k.data;
    block->k_grad_stride = k.stride;
  }
}

}  // namespace fa2::attention
