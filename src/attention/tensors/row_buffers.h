// SPDX-License-Identifier: Apache-2.0

// Reading and writing blocks of the caller's tensors.
#ifndef FA2_SRC_ATTENTION_TENSORS_ROW_BUFFERS_H_
#define FA2_SRC_ATTENTION_TENSORS_ROW_BUFFERS_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "src/attention/call/problem.h"
#include "src/attention/schedule/blocks.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/rows.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

// The rows of a block of queries, or of keys, in the tensors that hold them.
TensorRows QueryTensorRows(const Problem& problem, const BlockRows& block);
TensorRows KeyTensorRows(const Problem& problem, const BlockRows& block);

// Rows of a tensor; copied to `gathered` (dense, the view's dtype) when they
// are not contiguous.
simd::Rows ContiguousRows(const ConstTensorView& view, const TensorRows& at,
                          void* gathered);

// Which caches `outputs`, those that are given, will have left when they are
// read next: none, those of `workers` cores or, beside them, the last level.
enum class LeftCaches { kNone, kCores, kAll };
LeftCaches CachesLeft(std::initializer_list<ConstTensorView> outputs,
                      int workers);

// The accumulator of a block: the sum, in order, of `count` partials; none:
// zeros.
struct AccumulatorSum {
  enum class Kind { kKeys, kQueries };
  Kind kind = Kind::kQueries;
  int64_t rows = 0;  // of the block, padded to panels
  void* partials[std::max(kMaxKeySplits, kMaxGroupSplits)] = {};
  int count = 0;

  void Add(void* partial) { partials[count++] = partial; }
};

// What its rows are multiplied with before they are rounded.
struct RowScale {
  double factor = 1.0;
  const void* row_factor = nullptr;  // [row], of the accumulator's type
};

// Where they go.
struct StoredRows {
  TensorView tensor;
  TensorRows rows;
  bool accumulate = false;    // add to what is there
  bool non_temporal = false;  // see MutableRows
};

// Ends the softmax of a head's queries (RowKernels::finish, with its sink if
// there is one), and stores what `max` holds then where `lse` is given.
void FinishRows(const simd::RowKernels& kernels, const Problem& problem,
                const TensorView& lse, int64_t sequence, int64_t head,
                Interval queries, void* max, const void* sum, void* weight);

// Scales, rounds and stores rows of the accumulator's type. `narrowed` has room
// for them in the tensor's dtype; it is used where the tensor's rows are not
// contiguous.
void StoreRows(const simd::RowKernels& kernels, const void* rows,
               int64_t row_stride, const RowScale& scale, const StoredRows& to,
               void* narrowed);

// One worker's buffers for tensors whose rows are not contiguous, and for
// accumulator rows on their way out.
class RowBuffers {
 public:
  // Accumulator rows unpacked at a time.
  static constexpr int64_t kUnpackRows = 32;

  // `tensors`: all that Read and Store are called with. Most calls have none
  // whose rows would need copying, and then there is nothing to copy to.
  // `left`: the caches that what Store writes will have left.
  RowBuffers(std::initializer_list<ConstTensorView> tensors, LeftCaches left,
             const simd::Engine& engine, const simd::RowKernels& kernels,
             int64_t largest_block, threading::ScratchLayout* layout);

  // Rows of a tensor, copied when not contiguous: at most two such results are
  // valid at a time (`buffer` 0 and 1).
  simd::Rows Read(const ConstTensorView& view, const TensorRows& at,
                  int buffer = 0) const {
    return ContiguousRows(view, at, gathered_[buffer]);
  }

  // Scales, rounds and stores the first rows of a sum, which may be left in the
  // first of its partials.
  void Store(const AccumulatorSum& sum, const RowScale& scale,
             const StoredRows& to) const;

 private:
  // The same in one pass, where the engine has one for these rows.
  bool StoreInOnePass(const AccumulatorSum& sum, const RowScale& scale,
                      const StoredRows& to) const;

  const simd::Engine& engine_;
  const simd::RowKernels& kernels_;
  const LeftCaches left_;
  std::byte* gathered_[2];
  std::byte* rows_;
  std::byte* narrowed_;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_TENSORS_ROW_BUFFERS_H_
