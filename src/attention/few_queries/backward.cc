// SPDX-License-Identifier: Apache-2.0

// Backward for few queries. An item is a part of the keys of a kv head: dK and
// dV are sums over the few rows of queries that share the head, and are written
// once; dQ of the parts is added in order.
#include "src/attention/few_queries/backward.h"

#include <algorithm>
#include <cstring>

#include "src/attention/scores/non_finite.h"
#include "src/attention/tensors/row_buffers.h"

namespace fa2::attention {
namespace {

using threading::Team;

// ---- Preprocess, of each item for itself: the queries are few.

// Widens the item's rows of a tensor.
void Widen(const FewBackwardState& call, const FewQueriesItem& item,
           const ConstTensorView& tensor, FewOperand* operand) {
  const size_t element = call.element();
  ForQueryRows(call.problem, item, [&](const TensorRows& at, int64_t first) {
    const simd::Rows rows = ContiguousRows(tensor, at, operand->gathered);
    const simd::DirectRows to = RowsFrom(operand->rows, first, element);
    const simd::DirectRows finite =
        RowsFrom(operand->finite_rows, first, element);
    call.buffers.kernels.widen(rows, to);
    if (call.buffers.kernels.widen_finite(rows, finite)) {
      operand->non_finite = true;
    } else {
      call.buffers.kernels.widen(rows, finite);
    }
  });
}

// A row statistic of the item's rows.
template <typename T>
void ReadStatistic(const Problem& problem, const FewQueriesItem& item,
                   const ConstTensorView& view, T* to) {
  const RowStart start = StatisticsStart(problem, view, item.part->sequence);
  ForQueryRows(problem, item, [&](const TensorRows& at, int64_t first) {
    for (int64_t i = 0; i < at.count; ++i) {
      memcpy(to + first + i, At(view, start.batch, at.head, start.row + i),
             sizeof(T));
    }
  });
}

template <typename T>
void PrepareStatistics(const FewBackwardState& call, const FewQueriesItem& item,
                       const FewBackwardWorker& worker) {
  const AttentionBackwardArgs& args = call.args;
  T* const delta = reinterpret_cast<T*>(worker.delta);
  if (args.delta.given()) {
    ReadStatistic(call.problem, item, args.delta, delta);
  } else {
    ForQueryRows(call.problem, item, [&](const TensorRows& at, int64_t first) {
      call.row_kernels.dot(ContiguousRows(args.out, at, worker.gathered_out),
                           ContiguousRows(args.dout, at, worker.dout.gathered),
                           delta + first);
    });
  }
  T* const lse = reinterpret_cast<T*>(worker.lse);
  if (args.dlse.given()) {
    // By way of lse's place.
    ReadStatistic(call.problem, item, args.dlse, lse);
    const int64_t rows = RowsOf(call.problem, item);
    for (int64_t r = 0; r < rows; ++r) delta[r] -= lse[r];
  }
  ReadStatistic(call.problem, item, args.lse, lse);
}

// ---- Main loop.

// Stores dK or dV of a run of keys: the sums over rows of weights x.
void StoreKeyGradient(const FewBackwardState& call,
                      const FewBackwardWorker& worker,
                      const simd::DirectRows& weights,
                      const simd::DirectRows& x, double factor,
                      const StoredRows& to) {
  const int64_t depth = to.tensor.sizes[3];
  if (depth == 0 || (to.accumulate && weights.rows == 0)) return;
  simd::DirectRows gradients = worker.gradients;
  gradients.stride = DirectStride(depth);
  call.buffers.kernels.spread(weights, to.rows.count, x, depth, gradients);
  StoreRows(call.row_kernels, gradients.data, gradients.stride,
            {factor, nullptr}, to, worker.narrowed);
}

template <typename T>
void ProcessPart(const FewBackwardState& call, const FewQueriesItem& item,
                 const simd::DirectRows& dq, FewBackwardWorker& worker) {
  const Problem& problem = call.problem;
  const AttentionBackwardArgs& args = call.args;
  const simd::DirectKernels& kernels = call.buffers.kernels;
  const int64_t rows = dq.rows;
  Widen(call, item, problem.q, &worker.q);
  Widen(call, item, args.dout, &worker.dout);
  PrepareStatistics<T>(call, item, worker);
  const auto all = [rows](simd::DirectRows of) {
    of.rows = rows;
    return of;
  };
  const simd::DirectRows dp = all(worker.dp);
  simd::DirectScores scores;
  scores.products = all(worker.products);
  scores.scale = problem.scale;
  scores.softcap = problem.options.softcap;
  std::fill_n(static_cast<T*>(dq.data), rows * dq.stride, T(0));
  ForKeyRuns(item, [&](Interval keys) {
    const TensorRows at = KeyRowsOf(problem, item, keys);
    scores.views = worker.views.Of(item, keys);
    scores.keys = keys.size();
    simd::DirectRows p = scores.products, ds = dp;
    if (scores.views == nullptr) {
      p.rows = ds.rows = 0;  // sums of nothing
    } else {
      simd::Rows k = ContiguousRows(problem.k, at, worker.gathered_k);
      kernels.multiply(all(worker.q.rows), k, p);
      kernels.multiply(all(worker.dout.rows),
                       ContiguousRows(problem.v, at, worker.gathered_v), ds);
      kernels.backward_scores(scores, worker.lse, worker.delta,
                              problem.dropout_scale, ds);
      if (args.dq.given()) {
        if (kernels.widen_finite(k, worker.finite_k)) {
          worker.k_non_finite = true;
          k = {worker.finite_k.data, call.engine.accumulator,
               worker.finite_k.stride, k.rows, k.depth};
        }
        kernels.combine(ds, k, dq);
      }
    }
    const auto operand = [&p](simd::DirectRows of) {
      of.rows = p.rows;
      return of;
    };
    if (args.dv.given()) {
      StoreKeyGradient(call, worker, p, operand(worker.dout.finite_rows), 1.0,
                       {args.dv, at, args.accumulate_dv});
    }
    if (args.dk.given()) {
      StoreKeyGradient(call, worker, ds, operand(worker.q.finite_rows),
                       problem.scale, {args.dk, at, args.accumulate_dk});
    }
  });
}

// ---- Reduction.

void StoreQueryGradient(const FewBackwardState& call,
                        const FewQueriesItem& item, const simd::DirectRows& dq,
                        const FewBackwardWorker& worker) {
  if (call.problem.head_dim == 0) return;
  ForQueryRows(call.problem, item, [&](const TensorRows& at, int64_t first) {
    StoreRows(call.row_kernels, RowsFrom(dq, first, call.element()).data,
              dq.stride, {call.problem.scale, nullptr},
              {call.args.dq, at, call.args.accumulate_dq}, worker.narrowed);
  });
}

template <typename T>
void ExecuteAs(FewBackwardState& call, Team& team) {
  const FewQueriesPlan& plan = call.plan;
  const bool want_dq = call.args.dq.given();
  const int64_t kv_heads = call.problem.kv_heads;
  team.For(static_cast<int64_t>(plan.parts.size()) * kv_heads,
           [&](int64_t index, int w) {
             FewBackwardWorker& worker = call.buffers.workers[w];
             const FewQueriesItem item = {&plan.parts[index / kv_heads],
                                          index % kv_heads};
             const simd::DirectRows dq = call.buffers.Dq(item, worker);
             ProcessPart<T>(call, item, dq, worker);
             if (want_dq && item.part->partial < 0) {
               StoreQueryGradient(call, item, dq, worker);
             }
           });
  const int64_t merged = static_cast<int64_t>(plan.merged.size());
  if (want_dq && merged > 0) {
    team.For(merged * kv_heads, [&](int64_t index, int w) {
      const FewBackwardWorker& worker = call.buffers.workers[w];
      const Interval parts = plan.merged[index / kv_heads];
      const FewQueriesItem first = {&plan.parts[parts.begin], index % kv_heads};
      const simd::DirectRows dq = call.buffers.Dq(first, worker);
      for (int64_t p = parts.begin + 1; p < parts.end; ++p) {
        call.row_kernels.add(
            dq.data,
            call.buffers.Dq({&plan.parts[p], first.kv_head}, worker).data,
            dq.rows * dq.stride);
      }
      StoreQueryGradient(call, first, dq, worker);
    });
  }
}

// A non-finite row of Q or dO reaches the dK or dV of every key it sees, one of
// K the dQ of every query that sees it.
void SpreadNonFinite(const FewBackwardState& call, Team& team) {
  const AttentionBackwardArgs& args = call.args;
  bool q = false, k = false, dout = false;
  for (int w = 0; w < call.plan.workers; ++w) {
    const FewBackwardWorker& worker = call.buffers.workers[w];
    q |= worker.q.non_finite;
    k |= worker.k_non_finite;
    dout |= worker.dout.non_finite;
  }
  if (q && args.dk.given()) {
    SpreadFromQueries(call.problem, call.problem.q, args.dk,
                      NonFinite::kBecomesNaN, team);
  }
  if (dout && args.dv.given()) {
    SpreadFromQueries(call.problem, args.dout, args.dv, NonFinite::kIsAdded,
                      team);
  }
  if (k && args.dq.given()) {
    SpreadFromKeys(call.problem, call.problem.k, args.dq,
                   NonFinite::kBecomesNaN, team);
  }
}

}  // namespace

FewOperand::FewOperand(int64_t count, const ConstTensorView& tensor,
                       const FewBackwardInputs& in,
                       threading::ScratchLayout* layout)
    : rows(TakeRows(count, tensor.sizes[3], in.engine.accumulator, layout)),
      finite_rows(
          TakeRows(count, tensor.sizes[3], in.engine.accumulator, layout)),
      gathered(layout->Take(GatheredBytes(tensor, count))) {}

FewBackwardWorker::FewBackwardWorker(const FewBackwardInputs& in,
                                     threading::ScratchLayout* layout)
    : views(in.problem, in.staging, in.plan.most_rows, layout),
      q(in.plan.most_rows, in.problem.q, in, layout),
      dout(in.plan.most_rows, in.args.dout, in, layout) {
  const Problem& problem = in.problem;
  const AttentionBackwardArgs& args = in.args;
  const DType wide = in.engine.accumulator;
  const int64_t rows = in.plan.most_rows;
  const int64_t keys = simd::kDirectKeys;
  products = TakeRows(rows, keys, wide, layout);
  dp = TakeRows(rows, keys, wide, layout);
  dq = TakeRows(rows, problem.head_dim, wide, layout);
  gradients = TakeRows(keys, std::max(problem.head_dim, problem.value_dim),
                       wide, layout);
  finite_k = TakeRows(keys, problem.head_dim, wide, layout);
  lse = layout->Take(static_cast<size_t>(rows) * in.element());
  delta = layout->Take(static_cast<size_t>(rows) * in.element());
  gathered_k = layout->Take(GatheredBytes(problem.k, keys));
  gathered_v = layout->Take(GatheredBytes(problem.v, keys));
  gathered_out =
      layout->Take(args.out.given() ? GatheredBytes(args.out, rows) : 0);
  size_t bytes = 0;
  for (const TensorView& view : {args.dq, args.dk, args.dv}) {
    if (view.given()) {
      bytes = std::max(bytes, GatheredBytes(view, std::max(rows, keys)));
    }
  }
  narrowed = layout->Take(bytes);
}

FewBackwardBuffers::FewBackwardBuffers(const FewBackwardInputs& inputs,
                                       threading::ScratchLayout* layout)
    : in(inputs),
      kernels(*simd::DirectKernelsFor(in.engine.accumulator, in.targets)),
      workers(layout->Construct<FewBackwardWorker>(in.plan.workers, in)),
      partials_(
          TakeRows(in.plan.partials * in.problem.kv_heads * in.plan.most_rows,
                   in.problem.head_dim, in.engine.accumulator, layout)) {}

simd::DirectRows FewBackwardBuffers::Dq(const FewQueriesItem& item,
                                        const FewBackwardWorker& worker) const {
  simd::DirectRows rows = worker.dq;
  if (item.part->partial >= 0) {
    rows = RowsFrom(partials_,
                    (item.part->partial * in.problem.kv_heads + item.kv_head) *
                        in.plan.most_rows,
                    in.element());
  }
  rows.rows = RowsOf(in.problem, item);
  return rows;
}

bool FewQueriesBackward::Takes(const Args& args, const Problem& problem,
                               const simd::Engine& engine) {
  return !args.dbias.given() && !args.dalibi_slopes.given() &&
         !args.dsinks.given() && HasFewQueries(problem, engine);
}

void FewQueriesBackward::MakePlan(const Args& /*args*/, const Problem& problem,
                                  const simd::Engine& /*engine*/, int threads,
                                  Plan* plan) {
  PlanFewQueries(problem, /*all_keys=*/true, threads, plan);
}

void FewQueriesBackward::Execute(State& call, Team& team) {
  if (call.engine.accumulator == DType::kF64) {
    ExecuteAs<double>(call, team);
  } else {
    ExecuteAs<float>(call, team);
  }
  SpreadNonFinite(call, team);
}

}  // namespace fa2::attention
