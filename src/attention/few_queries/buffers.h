// SPDX-License-Identifier: Apache-2.0

// Memory of both passes of few queries.
#ifndef FA2_SRC_ATTENTION_FEW_QUERIES_BUFFERS_H_
#define FA2_SRC_ATTENTION_FEW_QUERIES_BUFFERS_H_

#include <cstddef>
#include <cstdint>

#include "src/attention/call/problem.h"
#include "src/attention/few_queries/items.h"
#include "src/simd/direct/direct.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

// Bytes of rows of a tensor where they must be gathered.
size_t GatheredBytes(const ConstTensorView& view, int64_t rows);

// Columns of rows of `depth` elements, whole vectors.
inline int64_t DirectStride(int64_t depth) {
  return RoundUp(depth, simd::kDirectLanes);
}

// An array of rows of the accumulator's type.
simd::DirectRows TakeRows(int64_t rows, int64_t depth, DType accumulator,
                          threading::ScratchLayout* layout);

// From row `first` on, for rows of `element` bytes an element.
inline simd::DirectRows RowsFrom(simd::DirectRows rows, int64_t first,
                                 size_t element) {
  rows.data = static_cast<std::byte*>(rows.data) +
              static_cast<size_t>(first * rows.stride) * element;
  rows.rows -= first;
  return rows;
}

// The first `count` rows.
inline simd::DirectRows FirstRows(simd::DirectRows rows, int64_t count) {
  rows.rows = count;
  return rows;
}

// Partial results: [partial][kv head], of most_rows rows each.
inline int64_t PartialCount(const FewQueriesPlan& plan, int64_t kv_heads) {
  return plan.partials * kv_heads;
}
// That of an item; not of one that is whole.
inline int64_t PartialOf(int64_t kv_heads, const FewQueriesItem& item) {
  return item.part->partial * kv_heads + item.kv_head;
}

// Runs of at most most_keys of K or V as one worker's products take them.
class KeyRuns {
 public:
  // `sums`: products add up rows, in which a 0 must not meet what is not
  // finite.
  KeyRuns(const ConstTensorView& tensor, int64_t most_keys, bool sums,
          DType accumulator, threading::ScratchLayout* layout);

  // As they lie.
  simd::Rows Read(const TensorRows& at) const;
  // How many of so many keys behind a run lie behind what Read gives.
  int64_t Following(int64_t keys) const;
  // For sums: with zeros for NaN and infinity.
  simd::Rows Finite(const simd::DirectKernels& kernels, const simd::Rows& rows);
  // Whether some run had any of these.
  bool non_finite() const { return non_finite_; }

 private:
  const ConstTensorView& tensor_;
  const DType accumulator_;
  simd::DirectRows finite_;
  std::byte* gathered_;
  bool non_finite_ = false;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_FEW_QUERIES_BUFFERS_H_
