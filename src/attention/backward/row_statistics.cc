// SPDX-License-Identifier: Apache-2.0
#include "src/attention/backward/row_statistics.h"

#include <cstring>
#include <limits>

namespace fa2::attention {
namespace {

// Calls take(i, value) for the block's rows of a statistic.
template <typename T, class Take>
void ForValues(const Problem& problem, const ConstTensorView& view,
               const BlockRows& queries, const Take& take) {
  const RowStart start = StatisticsStart(problem, view, queries.sequence);
  const char* at =
      At(view, start.batch, queries.head, start.row + queries.begin());
  // The stride of a dimension of one element may be any number.
  const int64_t step =
      view.sizes[2] > 1 ? view.strides[2] * static_cast<int64_t>(sizeof(T)) : 0;
  for (int64_t i = 0; i < queries.size(); ++i, at += step) {
    T value;
    memcpy(&value, at, sizeof(value));
    take(i, value);
  }
}

// A term for each panel of kTileQueries queries, whatever the sizes of blocks.
template <typename T>
void AddSinkTerms(const BackwardState& call, const BlockRows& queries,
                  const T* lse, const T* delta) {
  const int64_t panels =
      PanelsBefore(call.plan.sequences[queries.sequence].q_row,
                   queries.sequence, simd::kTileQueries);
  for (int64_t i = 0; i < queries.size(); ++i) {
    const int64_t query = queries.begin() + i;
    call.buffers.small.AddToSink(
        queries.sequence, queries.head, query, static_cast<double>(lse[i]),
        static_cast<double>(delta[i]), panels + query / simd::kTileQueries);
  }
}

template <typename T>
void PrepareAs(const BackwardState& call, const WorkerBuffers& worker,
               const BlockRows& queries, const QueryOperands& to) {
  const AttentionBackwardArgs& args = call.args;
  T* const lse = reinterpret_cast<T*>(to.lse);
  T* const delta = reinterpret_cast<T*>(to.delta);
  if (args.delta.given()) {
    ForValues<T>(call.problem, args.delta, queries,
                 [&](int64_t i, T value) { delta[i] = value; });
  } else {
    const TensorRows at = QueryTensorRows(call.problem, queries);
    call.row_kernels.dot(worker.rows.Read(args.out, at, 0),
                         worker.rows.Read(args.dout, at, 1), delta);
  }
  ForValues<T>(call.problem, args.lse, queries,
               [&](int64_t i, T value) { lse[i] = value; });
  if (args.dlse.given()) {
    ForValues<T>(call.problem, args.dlse, queries,
                 [&](int64_t i, T value) { delta[i] -= value; });
  }
  // Padding: exp(S - inf) is 0, and so is dS.
  for (int64_t i = queries.size(); i < queries.padded; ++i) {
    lse[i] = std::numeric_limits<T>::infinity();
    delta[i] = T(0);
  }
  if (call.buffers.small.wants_sinks()) {
    AddSinkTerms(call, queries, lse, delta);
  }
}

}  // namespace

void PrepareRowStatistics(const BackwardState& call,
                          const WorkerBuffers& worker, const BlockRows& queries,
                          const QueryOperands& to) {
  if (call.engine.accumulator == DType::kF64) {
    PrepareAs<double>(call, worker, queries, to);
  } else {
    PrepareAs<float>(call, worker, queries, to);
  }
}

}  // namespace fa2::attention
