// SPDX-License-Identifier: Apache-2.0

// Forward for few queries. An item is a part of the keys of a kv head: the
// queries that share the head are rows of one product with the keys as they
// lie. What the parts found is merged in order.
#include "src/attention/few_queries/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/attention/scores/finish_row.h"
#include "src/attention/scores/non_finite.h"
#include "src/attention/tensors/row_buffers.h"

namespace fa2::attention {
namespace {

using threading::Team;

// ---- Main loop.

template <typename T>
void AttendToPart(const FewForwardState& call, const FewQueriesItem& item,
                  const FewForwardRows& rows, FewForwardWorker& worker) {
  const Problem& problem = call.problem;
  const simd::DirectKernels& kernels = call.buffers.kernels;
  ForQueryRows(problem, item, [&](const TensorRows& at, int64_t first) {
    kernels.widen(ContiguousRows(problem.q, at, worker.gathered_q),
                  RowsFrom(worker.q, first, sizeof(T)));
  });
  simd::DirectRows q = worker.q;
  simd::DirectScores scores;
  scores.products = worker.products;
  scores.scale = problem.scale;
  scores.softcap = problem.options.softcap;
  q.rows = scores.products.rows = rows.out.rows;
  std::fill_n(reinterpret_cast<T*>(rows.max), rows.out.rows,
              -std::numeric_limits<T>::infinity());
  std::fill_n(reinterpret_cast<T*>(rows.sum), rows.out.rows, T(0));
  std::fill_n(static_cast<T*>(rows.out.data), rows.out.rows * rows.out.stride,
              T(0));
  ForKeyRuns(item, [&](Interval keys) {
    scores.views = worker.views.Of(item, keys);
    if (scores.views == nullptr) return;
    scores.keys = keys.size();
    const TensorRows at = KeyRowsOf(problem, item, keys);
    kernels.multiply(q, ContiguousRows(problem.k, at, worker.gathered_k),
                     scores.products);
    kernels.forward_scores(scores, rows.max, rows.sum, rows.out);
    simd::Rows v = ContiguousRows(problem.v, at, worker.gathered_v);
    if (kernels.widen_finite(v, worker.finite_v)) {
      worker.v_non_finite = true;
      v = {worker.finite_v.data, call.engine.accumulator,
           worker.finite_v.stride, v.rows, v.depth};
    }
    kernels.combine(scores.products, v, rows.out);
  });
}

// ---- Merge and store.

// Merges what other parts found into the rows of the first. A part that saw
// nothing, or NaN alone, has a maximum of -inf.
template <typename T>
void Merge(const FewForwardRows& to, const FewForwardRows& from) {
  T* const max = reinterpret_cast<T*>(to.max);
  T* const sum = reinterpret_cast<T*>(to.sum);
  const T* const from_max = reinterpret_cast<const T*>(from.max);
  const T* const from_sum = reinterpret_cast<const T*>(from.sum);
  for (int64_t r = 0; r < to.out.rows; ++r) {
    const T most = std::fmax(max[r], from_max[r]);
    const T keep = most == max[r] ? T(1) : std::exp(max[r] - most);
    const T take = most == from_max[r] ? T(1) : std::exp(from_max[r] - most);
    T* const o = static_cast<T*>(to.out.data) + r * to.out.stride;
    const T* const p =
        static_cast<const T*>(from.out.data) + r * from.out.stride;
    for (int64_t c = 0; c < to.out.stride; ++c)
      o[c] = o[c] * keep + p[c] * take;
    sum[r] = sum[r] * keep + from_sum[r] * take;
    max[r] = most;
  }
}

// Stores O and lse of the rows of an item.
template <typename T>
void StoreItem(const FewForwardState& call, const FewQueriesItem& item,
               const FewForwardRows& rows, const FewForwardWorker& worker) {
  const Problem& problem = call.problem;
  const ConstTensorView& sinks = problem.options.sinks;
  const TensorView& lse = call.args.lse;
  const T* const max = reinterpret_cast<const T*>(rows.max);
  T* const sum = reinterpret_cast<T*>(rows.sum);
  const RowStart start =
      lse.given() ? StatisticsStart(problem, lse, item.part->sequence)
                  : RowStart{0, 0};
  ForQueryRows(problem, item, [&](const TensorRows& at, int64_t first) {
    float sink = 0.0f;
    if (sinks.given()) memcpy(&sink, At(sinks, 0, at.head, 0), sizeof(sink));
    for (int64_t i = 0; i < at.count; ++i) {
      T& factor = sum[first + i];
      const FinishedRow<T> finished = FinishRow<T>(
          {max[first + i], factor, factor}, sinks.given() ? &sink : nullptr);
      factor = finished.factor;
      if (lse.given()) {
        memcpy(At(lse, start.batch, at.head, start.row + i), &finished.lse,
               sizeof(finished.lse));
      }
    }
    if (call.args.out.sizes[3] == 0) return;
    StoreRows(call.row_kernels, RowsFrom(rows.out, first, sizeof(T)).data,
              rows.out.stride, {problem.dropout_scale, sum + first},
              {call.args.out, at}, worker.narrowed);
  });
}

template <typename T>
void ExecuteAs(FewForwardState& call, Team& team) {
  const FewQueriesPlan& plan = call.plan;
  const int64_t kv_heads = call.problem.kv_heads;
  team.For(static_cast<int64_t>(plan.parts.size()) * kv_heads,
           [&](int64_t index, int w) {
             FewForwardWorker& worker = call.buffers.workers[w];
             const FewQueriesItem item = {&plan.parts[index / kv_heads],
                                          index % kv_heads};
             const FewForwardRows rows = call.buffers.Rows(item, worker);
             AttendToPart<T>(call, item, rows, worker);
             if (item.part->partial < 0) StoreItem<T>(call, item, rows, worker);
           });
  const int64_t merged = static_cast<int64_t>(plan.merged.size());
  if (merged > 0) {
    team.For(merged * kv_heads, [&](int64_t index, int w) {
      const FewForwardWorker& worker = call.buffers.workers[w];
      const Interval parts = plan.merged[index / kv_heads];
      FewQueriesItem item = {&plan.parts[parts.begin], index % kv_heads};
      const FewForwardRows rows = call.buffers.Rows(item, worker);
      for (int64_t p = parts.begin + 1; p < parts.end; ++p) {
        Merge<T>(rows,
                 call.buffers.Rows({&plan.parts[p], item.kv_head}, worker));
      }
      StoreItem<T>(call, item, rows, worker);
    });
  }
  if (std::any_of(call.buffers.workers, call.buffers.workers + plan.workers,
                  [](const FewForwardWorker& w) { return w.v_non_finite; })) {
    SpreadFromKeys(call.problem, call.problem.v, call.args.out,
                   NonFinite::kIsAdded, team);
  }
}

}  // namespace

FewForwardRows::FewForwardRows(int64_t rows, const FewForwardInputs& in,
                               threading::ScratchLayout* layout)
    : out(TakeRows(rows, in.problem.value_dim, in.engine.accumulator, layout)),
      max(layout->Take(static_cast<size_t>(rows) * in.element())),
      sum(layout->Take(static_cast<size_t>(rows) * in.element())) {}

FewForwardRows FewForwardRows::From(int64_t first, size_t element) const {
  FewForwardRows rows = *this;
  rows.out = RowsFrom(out, first, element);
  rows.max += static_cast<size_t>(first) * element;
  rows.sum += static_cast<size_t>(first) * element;
  return rows;
}

FewForwardWorker::FewForwardWorker(const FewForwardInputs& in,
                                   threading::ScratchLayout* layout)
    : views(in.problem, in.staging, in.plan.most_rows, layout),
      rows(in.plan.most_rows, in, layout) {
  const Problem& problem = in.problem;
  const DType wide = in.engine.accumulator;
  q = TakeRows(in.plan.most_rows, problem.head_dim, wide, layout);
  products = TakeRows(in.plan.most_rows, simd::kDirectKeys, wide, layout);
  finite_v = TakeRows(simd::kDirectKeys, problem.value_dim, wide, layout);
  gathered_q = layout->Take(GatheredBytes(problem.q, in.plan.most_rows));
  gathered_k = layout->Take(GatheredBytes(problem.k, simd::kDirectKeys));
  gathered_v = layout->Take(GatheredBytes(problem.v, simd::kDirectKeys));
  narrowed = layout->Take(GatheredBytes(in.args.out, in.plan.most_rows));
}

FewForwardBuffers::FewForwardBuffers(const FewForwardInputs& inputs,
                                     threading::ScratchLayout* layout)
    : in(inputs),
      kernels(*simd::DirectKernelsFor(in.engine.accumulator, in.targets)),
      workers(layout->Construct<FewForwardWorker>(in.plan.workers, in)),
      partials_(in.plan.partials * in.problem.kv_heads * in.plan.most_rows, in,
                layout) {}

FewForwardRows FewForwardBuffers::Rows(const FewQueriesItem& item,
                                       const FewForwardWorker& worker) const {
  FewForwardRows rows = worker.rows;
  if (item.part->partial >= 0) {
    rows = partials_.From(
        (item.part->partial * in.problem.kv_heads + item.kv_head) *
            in.plan.most_rows,
        in.element());
  }
  rows.out.rows = RowsOf(in.problem, item);
  return rows;
}

bool FewQueriesForward::Takes(const Args& /*args*/, const Problem& problem,
                              const simd::Engine& engine) {
  return HasFewQueries(problem, engine);
}

void FewQueriesForward::MakePlan(const Args& /*args*/, const Problem& problem,
                                 const simd::Engine& /*engine*/, int threads,
                                 Plan* plan) {
  PlanFewQueries(problem, /*all_keys=*/false, threads, plan);
}

void FewQueriesForward::Execute(State& call, Team& team) {
  if (call.engine.accumulator == DType::kF64) {
    ExecuteAs<double>(call, team);
  } else {
    ExecuteAs<float>(call, team);
  }
}

}  // namespace fa2::attention
