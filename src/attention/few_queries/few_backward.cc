// SPDX-License-Identifier: Apache-2.0

// Backward for few queries. An item is a part of the keys of a kv head: dK and
// dV are sums over the few rows of queries that share the head, and are written
// once; dQ of the parts is added in order.
#include "src/attention/few_queries/few_backward.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <vector>

#include "src/attention/scores/non_finite.h"
#include "src/attention/tensors/row_buffers.h"

namespace fa2::attention {
namespace {

using threading::Team;

// Keys of a run: five products read its K, V and scores, from L1.
constexpr int64_t kRunKeys = simd::kDirectKeyBlock;

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
  const SmallGradients& small = call.buffers.small;
  if (!small.wants_sinks() || item.part->keys.begin > 0) return;
  const int64_t sequence = item.part->sequence;
  ForQueryRows(call.problem, item, [&](const TensorRows& at, int64_t first) {
    for (int64_t i = 0; i < at.count; ++i) {
      small.AddToSink(sequence, at.head, i, static_cast<double>(lse[first + i]),
                      static_cast<double>(delta[first + i]), sequence);
    }
  });
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
  const TensorView& out = to.tensor;
  const auto spread = [&](const simd::DirectRows& rows) {
    call.buffers.kernels.spread(weights, to.rows.count, x, depth, factor, rows);
  };
  if (out.dtype == call.engine.accumulator && HasContiguousRows(out) &&
      !to.accumulate) {
    return spread({At(out, to.rows.batch, to.rows.head, to.rows.first),
                   out.strides[2], to.rows.count});
  }
  simd::DirectRows gradients = worker.gradients;
  gradients.stride = DirectStride(depth);
  spread(gradients);
  StoreRows(call.row_kernels, gradients.data, gradients.stride, {}, to,
            worker.narrowed);
}

// Adds -dS distance to the terms of slopes.
template <typename T>
void AddToSlopes(const FewBackwardState& call, const FewQueriesItem& item,
                 const simd::DirectScores& scores, const simd::DirectRows& ds) {
  const int64_t part = item.part - call.plan.parts.data();
  ForQueryRows(call.problem, item, [&](const TensorRows& at, int64_t first) {
    double sum = 0.0;
    for (int64_t r = first; r < first + at.count; ++r) {
      const T* const row = static_cast<const T*>(ds.data) + r * ds.stride;
      const double position = scores.views[r].position;
      for (int64_t k = 0; k < scores.keys; ++k) {
        sum -= static_cast<double>(row[k]) *
               std::abs(position - static_cast<double>(k));
      }
    }
    call.buffers.small.AlibiTerm(at.head, part) += sum;
  });
}

// Stores dS of a run of keys, or zeros where no row sees any, as dbias.
template <typename T>
void StoreBiasGradient(const FewBackwardState& call, const FewQueriesItem& item,
                       Interval keys, bool seen, const simd::DirectRows& ds,
                       const FewBackwardWorker& worker) {
  const bool add = call.args.accumulate_dbias;
  if (!seen) {
    if (add) return;
    std::fill_n(static_cast<T*>(ds.data),
                RowsOf(call.problem, item) * ds.stride, T(0));
  }
  TensorView run = call.args.dbias;
  run.data = At(run, 0, 0, 0, keys.begin);
  run.sizes[3] = keys.size();
  ForQueryRows(call.problem, item, [&](TensorRows at, int64_t first) {
    at.first = 0;
    StoreRows(call.row_kernels, RowsFrom(ds, first, sizeof(T)).data, ds.stride,
              {1.0, nullptr}, {run, at, add}, worker.narrowed);
  });
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
  std::fill_n(static_cast<T*>(dq.data), rows * dq.stride, T(0));
  ForKeyRuns(item, kRunKeys, [&](Interval keys) {
    const TensorRows at = KeyRowsOf(problem, item, keys);
    const simd::DirectScores scores =
        worker.views.Scores(item, keys, worker.products);
    // Without views sums of nothing.
    const int64_t seeing = scores.views == nullptr ? 0 : rows;
    const simd::DirectRows p = FirstRows(scores.products, seeing);
    const simd::DirectRows ds = FirstRows(worker.dp, seeing);
    if (seeing > 0) {
      const int64_t after = KeysAfter(item, keys);
      const simd::Rows k = worker.k.Read(at);
      kernels.multiply(FirstRows(worker.q.rows, rows), k,
                       worker.k.Following(after), p);
      kernels.multiply(FirstRows(worker.dout.rows, rows), worker.v.Read(at),
                       worker.v.Following(after), ds);
      kernels.backward_scores(scores, worker.lse, worker.delta,
                              problem.dropout_scale, ds);
      if (args.dq.given()) {
        kernels.combine(ds, worker.k.Finite(kernels, k), /*following=*/0, dq);
      }
    }
    if (seeing > 0 && args.dalibi_slopes.given()) {
      AddToSlopes<T>(call, item, scores, ds);
    }
    if (args.dbias.given()) {
      StoreBiasGradient<T>(call, item, keys, seeing > 0, ds, worker);
    }
    if (args.dv.given()) {
      StoreKeyGradient(call, worker, p,
                       FirstRows(worker.dout.finite_rows, seeing), 1.0,
                       {args.dv, at, args.accumulate_dv});
    }
    if (args.dk.given()) {
      StoreKeyGradient(call, worker, ds,
                       FirstRows(worker.q.finite_rows, seeing), problem.scale,
                       {args.dk, at, args.accumulate_dk});
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
  const FewBackwardBuffers& buffers = call.buffers;
  const bool want_dq = call.args.dq.given();
  ForItems(
      plan, call.problem.kv_heads, buffers.done, team,
      [&](const FewQueriesItem& item, int w) {
        FewBackwardWorker& worker = buffers.workers[w];
        const simd::DirectRows dq = buffers.Dq(item, worker);
        ProcessPart<T>(call, item, dq, worker);
        if (want_dq && item.whole()) StoreQueryGradient(call, item, dq, worker);
      },
      [&](const FewQueriesItem& first, const FewQueriesItem& part, int w) {
        if (!want_dq) return;
        const FewBackwardWorker& worker = buffers.workers[w];
        const simd::DirectRows dq = buffers.Dq(first, worker);
        call.row_kernels.add(dq.data, buffers.Dq(part, worker).data,
                             dq.rows * dq.stride);
      },
      [&](const FewQueriesItem& first, int w) {
        if (!want_dq) return;
        const FewBackwardWorker& worker = buffers.workers[w];
        StoreQueryGradient(call, first, buffers.Dq(first, worker), worker);
      });
}

// A non-finite row of Q or dO reaches the dK or dV of every key it sees, one of
// K the dQ of every query that sees it.
void SpreadNonFinite(const FewBackwardState& call, Team& team) {
  const AttentionBackwardArgs& args = call.args;
  bool q = false, k = false, dout = false;
  for (int w = 0; w < call.plan.workers; ++w) {
    const FewBackwardWorker& worker = call.buffers.workers[w];
    q |= worker.q.non_finite;
    k |= worker.k.non_finite();
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

// Whether elements of dbias are sums of several of dS.
bool SumsOverBroadcast(const TensorView& dbias, const Problem& problem) {
  const std::array<int64_t, 4> all = {problem.q.sizes[0], problem.q_heads,
                                      problem.q.sizes[2], problem.k.sizes[2]};
  return dbias.given() &&
         !std::equal(all.begin(), all.end(), std::begin(dbias.sizes));
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
    : views(in.problem, in.staging, in.plan.most_rows, kRunKeys, layout),
      q(in.plan.most_rows, in.problem.q, in, layout),
      dout(in.plan.most_rows, in.args.dout, in, layout),
      k(in.problem.k, kRunKeys, /*sums=*/true, in.engine.accumulator, layout),
      v(in.problem.v, kRunKeys, /*sums=*/false, in.engine.accumulator, layout) {
  const Problem& problem = in.problem;
  const AttentionBackwardArgs& args = in.args;
  const DType wide = in.engine.accumulator;
  const int64_t rows = in.plan.most_rows;
  products = TakeRows(rows, kRunKeys, wide, layout);
  dp = TakeRows(rows, kRunKeys, wide, layout);
  dq = TakeRows(rows, problem.head_dim, wide, layout);
  gradients = TakeRows(kRunKeys, std::max(problem.head_dim, problem.value_dim),
                       wide, layout);
  lse = layout->Take(static_cast<size_t>(rows) * in.element());
  delta = layout->Take(static_cast<size_t>(rows) * in.element());
  gathered_out =
      layout->Take(args.out.given() ? GatheredBytes(args.out, rows) : 0);
  size_t bytes = 0;
  for (const TensorView& view : {args.dq, args.dk, args.dv}) {
    if (view.given()) {
      bytes = std::max(bytes, GatheredBytes(view, std::max(rows, kRunKeys)));
    }
  }
  if (args.dbias.given()) {
    ConstTensorView run = args.dbias;
    run.sizes[3] = kRunKeys;
    bytes = std::max(bytes, GatheredBytes(run, rows));
  }
  narrowed = layout->Take(bytes);
}

FewBackwardBuffers::FewBackwardBuffers(const FewBackwardInputs& inputs,
                                       threading::ScratchLayout* layout)
    : in(inputs),
      small(in.args, in.problem,
            static_cast<int64_t>(in.problem.sequences.size()),
            static_cast<int64_t>(in.plan.parts.size()), layout),
      kernels(*simd::DirectKernelsFor(in.engine.accumulator, in.targets)),
      workers(layout->Construct<FewBackwardWorker>(in.plan.workers, in)),
      done(in.plan, in.problem.kv_heads, layout),
      partials_(TakeRows(
          PartialCount(in.plan, in.problem.kv_heads) * in.plan.most_rows,
          in.problem.head_dim, in.engine.accumulator, layout)) {}

simd::DirectRows FewBackwardBuffers::Dq(const FewQueriesItem& item,
                                        const FewBackwardWorker& worker) const {
  const simd::DirectRows rows =
      item.whole()
          ? worker.dq
          : RowsFrom(partials_,
                     PartialOf(in.problem.kv_heads, item) * in.plan.most_rows,
                     in.element());
  return FirstRows(rows, RowsOf(in.problem, item));
}

bool FewQueriesBackward::Takes(const Args& args, const Problem& problem,
                               const simd::Engine& engine) {
  const bool scores = args.dbias.given() || args.dalibi_slopes.given();
  if (scores && problem.options.softcap != 0.0) return false;
  return !SumsOverBroadcast(args.dbias, problem) &&
         HasFewQueries(problem, engine);
}

void FewQueriesBackward::MakePlan(const Problem& problem,
                                  const simd::Engine& /*engine*/, Use threads,
                                  Plan* plan) {
  PlanFewQueries(problem, /*all_keys=*/true, threads, plan);
}

void FewQueriesBackward::Execute(State& call, Team& team) {
  call.buffers.small.Clear();
  if (call.engine.accumulator == DType::kF64) {
    ExecuteAs<double>(call, team);
  } else {
    ExecuteAs<float>(call, team);
  }
  // Parts are listed sequence by sequence.
  const std::vector<KeyPart>& parts = call.plan.parts;
  const auto first_of = [&parts](int64_t sequence) {
    return std::partition_point(
        parts.begin(), parts.end(),
        [sequence](const KeyPart& p) { return p.sequence < sequence; });
  };
  call.buffers.small.Store([&](int64_t sequence) {
    return first_of(sequence + 1) - first_of(sequence);
  });
  SpreadNonFinite(call, team);
}

}  // namespace fa2::attention
