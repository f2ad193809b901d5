// SPDX-License-Identifier: Apache-2.0

// What forward and backward of few queries share: a worker's rows of queries
// against one run of keys after another, and how the rows see the run.
#ifndef FA2_SRC_ATTENTION_FEW_QUERIES_BUFFERS_H_
#define FA2_SRC_ATTENTION_FEW_QUERIES_BUFFERS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "src/attention/call/problem.h"
#include "src/attention/few_queries/plan.h"
#include "src/simd/direct/direct.h"
#include "src/simd/rowwise/staging.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

// A part of the keys of a kv head, with the rows of queries that share it: row
// g * Nq + i is query i of the group's query head g.
struct FewQueriesItem {
  const KeyPart* part = nullptr;
  int64_t kv_head = 0;
};

// Bytes of rows of a tensor where they must be gathered.
size_t GatheredBytes(const ConstTensorView& view, int64_t rows);

// Columns of rows of `depth` elements, whole vectors.
inline int64_t DirectStride(int64_t depth) {
  return RoundUp(depth, simd::kDirectLanes);
}

// An array of rows of the accumulator's type.
simd::DirectRows TakeRows(int64_t rows, int64_t depth, DType accumulator,
                          threading::ScratchLayout* layout);

// How the rows of an item see runs of its keys.
class RowViews {
 public:
  RowViews(const Problem& problem, const simd::StagingKernels& staging,
           int64_t most_rows, threading::ScratchLayout* layout);

  // The rows' views of `keys`, at most kDirectKeys of the sequence; nullptr
  // where none sees any of them.
  const simd::DirectView* Of(const FewQueriesItem& item, Interval keys) const;

 private:
  // Whether an array of bias shows any row a key.
  bool BiasShows(const FewQueriesItem& item, Interval keys) const;

  const Problem& problem_;
  const simd::StagingKernels& staging_;
  simd::DirectView* views_;
  uint8_t* keep_ = nullptr;  // [row][key]
};

// How many rows of queries an item has.
inline int64_t RowsOf(const Problem& problem, const FewQueriesItem& item) {
  return problem.sequences[item.part->sequence].nq() * problem.group();
}

// Rows of queries of an item, in the sequence's tensors: of each query head of
// the group Nq rows. Calls take(rows in the tensor, first row of the item).
template <class Take>
void ForQueryRows(const Problem& problem, const FewQueriesItem& item,
                  const Take& take) {
  const Sequence& s = problem.sequences[item.part->sequence];
  for (int64_t g = 0; g < problem.group(); ++g) {
    take(TensorRows{s.batch, item.kv_head * problem.group() + g, s.q_begin,
                    s.nq()},
         g * s.nq());
  }
}

// From row `first` on, for rows of `element` bytes an element.
inline simd::DirectRows RowsFrom(simd::DirectRows rows, int64_t first,
                                 size_t element) {
  rows.data = static_cast<std::byte*>(rows.data) +
              static_cast<size_t>(first * rows.stride) * element;
  rows.rows -= first;
  return rows;
}

// Rows of the item's keys in K or V.
inline TensorRows KeyRowsOf(const Problem& problem, const FewQueriesItem& item,
                            Interval keys) {
  const Sequence& s = problem.sequences[item.part->sequence];
  return {s.batch, item.kv_head, s.k_begin + keys.begin, keys.size()};
}

// Calls run(keys) for the runs of an item's keys.
template <class Run>
void ForKeyRuns(const FewQueriesItem& item, const Run& run) {
  const Interval& keys = item.part->keys;
  for (int64_t k = keys.begin; k < keys.end; k += simd::kDirectKeys) {
    run(Interval{k, std::min(k + simd::kDirectKeys, keys.end)});
  }
}

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_FEW_QUERIES_BUFFERS_H_
