// SPDX-License-Identifier: Apache-2.0

// Forward for few queries. An item is a part of the keys of a kv head: the
// queries that share the head are rows of one product with the keys as they
// lie. What the parts found is merged in order.
#include "src/attention/few_queries/few_forward.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "src/attention/scores/non_finite.h"
#include "src/attention/tensors/row_buffers.h"

namespace fa2::attention {
namespace {

using threading::Team;

// ---- Main loop.

// With `any_values` V may hold NaN and infinity.
template <typename T>
void AttendToPart(const FewForwardState& call, const FewQueriesItem& item,
                  const FewForwardRows& rows, bool any_values,
                  FewForwardWorker& worker) {
  const Problem& problem = call.problem;
  const simd::DirectKernels& kernels = call.buffers.kernels;
  ForQueryRows(problem, item, [&](const TensorRows& at, int64_t first) {
    kernels.widen(ContiguousRows(problem.q, at, worker.gathered_q),
                  RowsFrom(worker.q, first, sizeof(T)));
  });
  const simd::DirectRows q = FirstRows(worker.q, rows.out.rows);
  std::fill_n(reinterpret_cast<T*>(rows.max), rows.out.rows,
              -std::numeric_limits<T>::infinity());
  std::fill_n(reinterpret_cast<T*>(rows.sum), rows.out.rows, T(0));
  std::fill_n(static_cast<T*>(rows.out.data), rows.out.rows * rows.out.stride,
              T(0));
  ForKeyRuns(item, worker.run_keys, [&](Interval keys) {
    const simd::DirectScores scores =
        worker.views.Scores(item, keys, worker.products);
    if (scores.views == nullptr) return;
    const TensorRows at = KeyRowsOf(problem, item, keys);
    const int64_t after = KeysAfter(item, keys);
    kernels.multiply(q, worker.k.Read(at), worker.k.Following(after),
                     scores.products);
    kernels.forward_scores(scores, rows.max, rows.sum, rows.out);
    simd::Rows v = worker.v.Read(at);
    int64_t following = worker.v.Following(after);
    if (any_values) {
      v = worker.v.Finite(kernels, v);
      following = 0;
    }
    kernels.combine(scores.products, v, following, rows.out);
  });
}

// Whether V was finite, if so many columns of a row of O are: NaN or infinity
// in a run of keys makes its columns NaN or infinite in every row.
template <typename T>
bool IsFinite(const simd::DirectRows& out, int64_t columns) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  const T* const o = static_cast<const T*>(out.data);
  Bits not_finite = 0;  // as wide as T, so that compilers use vectors
  for (int64_t c = 0; c < columns; ++c) {
    not_finite |= std::abs(o[c]) <= std::numeric_limits<T>::max() ? 0 : 1;
  }
  return not_finite == 0;
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
  T* const max = reinterpret_cast<T*>(rows.max);
  T* const sum = reinterpret_cast<T*>(rows.sum);
  ForQueryRows(problem, item, [&](const TensorRows& at, int64_t first) {
    FinishRows(call.row_kernels, problem, call.args.lse, item.part->sequence,
               at.head, {0, at.count}, max + first, sum + first, sum + first);
    if (call.args.out.sizes[3] == 0) return;
    StoreRows(call.row_kernels, RowsFrom(rows.out, first, sizeof(T)).data,
              rows.out.stride, {problem.dropout_scale, sum + first},
              {call.args.out, at}, worker.narrowed);
  });
}

template <typename T>
void ExecuteAs(FewForwardState& call, Team& team) {
  const FewQueriesPlan& plan = call.plan;
  const FewForwardBuffers& buffers = call.buffers;
  ForItems(
      plan, call.problem.kv_heads, buffers.done, team,
      [&](const FewQueriesItem& item, int w) {
        FewForwardWorker& worker = buffers.workers[w];
        const FewForwardRows rows = buffers.Rows(item, worker);
        AttendToPart<T>(call, item, rows, /*any_values=*/false, worker);
        if (!IsFinite<T>(rows.out, call.problem.value_dim)) {
          AttendToPart<T>(call, item, rows, /*any_values=*/true, worker);
        }
        if (item.whole()) StoreItem<T>(call, item, rows, worker);
      },
      [&](const FewQueriesItem& first, const FewQueriesItem& part, int w) {
        const FewForwardWorker& worker = buffers.workers[w];
        Merge<T>(buffers.Rows(first, worker), buffers.Rows(part, worker));
      },
      [&](const FewQueriesItem& first, int w) {
        const FewForwardWorker& worker = buffers.workers[w];
        StoreItem<T>(call, first, buffers.Rows(first, worker), worker);
      });
  if (std::any_of(buffers.workers, buffers.workers + plan.workers,
                  [](const FewForwardWorker& w) { return w.v.non_finite(); })) {
    SpreadFromKeys(call.problem, call.problem.v, call.args.out,
                   NonFinite::kIsAdded, team);
  }
}

// Bytes of the maxima, or of the sums, of an item. Each has cache lines of its
// own: workers change them with every run of keys (one query of 16 heads of
// 1,024 keys on 16 threads: 52 us where they shared them, 34 so).
size_t StatisticBytes(const FewForwardInputs& in) {
  return threading::AlignUp(static_cast<size_t>(in.plan.most_rows) *
                            in.element());
}

// Keys of a run at most. A row of a run costs its maximum, its sum and what its
// options take, however many keys it has, and each run begins reading K and V
// anew: 256 keys instead of 64 are 0.85 to 0.95 of the time, 1,024 instead of
// 256 0.90 to 1.02. But the products of a run stay in L1, and what a worker
// keeps of it is little where rows are long.
int64_t RunKeys(const FewForwardInputs& in) {
  constexpr int64_t kMostProducts = 4096;
  constexpr int64_t kMostElements = 65536;
  const int64_t depth =
      std::max({in.problem.head_dim, in.problem.value_dim, int64_t{1}});
  const int64_t rows = std::max<int64_t>(in.plan.most_rows, 1);
  const int64_t keys = std::min(kMostProducts / rows, kMostElements / depth);
  return std::clamp(keys / simd::kDirectKeyBlock * simd::kDirectKeyBlock,
                    simd::kDirectKeyBlock, simd::kDirectKeys);
}

}  // namespace

FewForwardRows::FewForwardRows(int64_t items, const FewForwardInputs& in,
                               threading::ScratchLayout* layout)
    : out(TakeRows(items * in.plan.most_rows, in.problem.value_dim,
                   in.engine.accumulator, layout)),
      max(layout->Take(static_cast<size_t>(items) * StatisticBytes(in))),
      sum(layout->Take(static_cast<size_t>(items) * StatisticBytes(in))) {}

FewForwardRows FewForwardRows::Of(int64_t item,
                                  const FewForwardInputs& in) const {
  FewForwardRows rows = *this;
  rows.out = RowsFrom(out, item * in.plan.most_rows, in.element());
  rows.max += static_cast<size_t>(item) * StatisticBytes(in);
  rows.sum += static_cast<size_t>(item) * StatisticBytes(in);
  return rows;
}

FewForwardWorker::FewForwardWorker(const FewForwardInputs& in,
                                   threading::ScratchLayout* layout)
    : run_keys(RunKeys(in)),
      views(in.problem, in.staging, in.plan.most_rows, run_keys, layout),
      rows(1, in, layout),
      k(in.problem.k, run_keys, /*sums=*/false, in.engine.accumulator, layout),
      v(in.problem.v, run_keys, /*sums=*/true, in.engine.accumulator, layout),
      q(TakeRows(in.plan.most_rows, in.problem.head_dim, in.engine.accumulator,
                 layout)),
      products(
          TakeRows(in.plan.most_rows, run_keys, in.engine.accumulator, layout)),
      gathered_q(layout->Take(GatheredBytes(in.problem.q, in.plan.most_rows))),
      narrowed(layout->Take(GatheredBytes(in.args.out, in.plan.most_rows))) {}

FewForwardBuffers::FewForwardBuffers(const FewForwardInputs& inputs,
                                     threading::ScratchLayout* layout)
    : in(inputs),
      kernels(*simd::DirectKernelsFor(in.engine.accumulator, in.targets)),
      workers(layout->Construct<FewForwardWorker>(in.plan.workers, in)),
      done(in.plan, in.problem.kv_heads, layout),
      partials_(PartialCount(in.plan, in.problem.kv_heads), in, layout) {}

FewForwardRows FewForwardBuffers::Rows(const FewQueriesItem& item,
                                       const FewForwardWorker& worker) const {
  FewForwardRows rows =
      item.whole() ? worker.rows
                   : partials_.Of(PartialOf(in.problem.kv_heads, item), in);
  rows.out.rows = RowsOf(in.problem, item);
  return rows;
}

bool FewQueriesForward::Takes(const Args& /*args*/, const Problem& problem,
                              const simd::Engine& engine) {
  return HasFewQueries(problem, engine);
}

void FewQueriesForward::MakePlan(const Problem& problem,
                                 const simd::Engine& /*engine*/, Use threads,
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
