// SPDX-License-Identifier: Apache-2.0
#include "src/attention/backward/gradients.h"

#include <cstring>

namespace fa2::attention {

void JoinKeyGradients(const BackwardState& call, const WorkerBuffers& worker,
                      const BlockId& id) {
  const DkvAccum sum = worker.Dkv(id, 0);
  const DkvAccum term = worker.Dkv(id, 1);
  if (*term.touched == 0) return;
  const int64_t rows = call.plan.KeyRows(id).padded;
  const auto join = [&](std::byte* to, const std::byte* from, int64_t depth) {
    const size_t bytes = call.engine.key_accumulator_bytes(rows, depth);
    if (*sum.touched == 0) {
      memcpy(to, from, bytes);
    } else {
      call.row_kernels.add(to, from,
                           static_cast<int64_t>(bytes / call.element()));
    }
  };
  if (call.args.dk.given()) join(sum.dk, term.dk, call.problem.head_dim);
  if (call.args.dv.given()) join(sum.dv, term.dv, call.problem.value_dim);
  *sum.touched = 1;
  *term.touched = 0;
}

void StoreKeyGradients(const BackwardState& call, const WorkerBuffers& worker,
                       const BlockId& id) {
  const BlockRows keys = call.plan.KeyRows(id);
  const TensorRows at = KeyTensorRows(call.problem, keys);
  AccumulatorSum dk = {AccumulatorSum::Kind::kKeys, keys.padded};
  AccumulatorSum dv = dk;
  for (int64_t p = 0; p < call.plan.dkv_partials(); ++p) {
    const DkvAccum partial = worker.Dkv(id, p);
    if (*partial.touched == 0) continue;
    dk.Add(partial.dk);
    dv.Add(partial.dv);
  }
  const AttentionBackwardArgs& args = call.args;
  if (args.dk.given()) {
    worker.rows.Store(dk, {call.problem.scale},
                      {args.dk, at, args.accumulate_dk});
  }
  if (args.dv.given()) {
    worker.rows.Store(dv, {1.0}, {args.dv, at, args.accumulate_dv});
  }
}

void StoreQueryGradient(const BackwardState& call, const WorkerBuffers& worker,
                        const BlockId& id) {
  const BlockRows queries = call.plan.QueryRows(id);
  AccumulatorSum dq = {AccumulatorSum::Kind::kQueries, queries.padded};
  const int64_t splits = call.plan.sequences[id.sequence].key_splits;
  for (int64_t split = 0; split < splits; ++split) {
    const DqAccum partial = worker.Dq(id, split);
    if (*partial.touched != 0) dq.Add(partial.data);
  }
  worker.rows.Store(dq, {call.problem.scale},
                    {call.args.dq, QueryTensorRows(call.problem, queries),
                     call.args.accumulate_dq});
}

}  // namespace fa2::attention
