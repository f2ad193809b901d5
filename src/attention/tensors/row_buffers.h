// Reading and writing blocks of the caller's tensors.
#ifndef FA2_SRC_ATTENTION_TENSORS_ROW_BUFFERS_H_
#define FA2_SRC_ATTENTION_TENSORS_ROW_BUFFERS_H_

#include <cstdint>
#include <initializer_list>

#include "src/attention/call/problem.h"
#include "src/attention/schedule/blocks.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/rows.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

inline bool HasContiguousRows(const ConstTensorView& view) {
  return view.strides[3] == 1 || view.sizes[3] <= 1;
}

// Rows [first, first + count) of a head; copied to `gathered` (dense, the
// view's dtype) when its rows are not contiguous.
simd::Rows ContiguousRows(const ConstTensorView& view, int64_t batch,
                          int64_t head, int64_t first, int64_t count,
                          void* gathered);

// Whether `outputs`, those that are given, will have left the caches of
// `workers` cores when they are read next. 4 MiB a core is twice an L2 (AMX,
// one thread: with 6 MiB written past the caches the backward gains 4%, with
// 0.75 MiB it loses 2%, with 48 KiB 10%).
bool LeaveCaches(std::initializer_list<ConstTensorView> outputs, int workers);

// One worker's buffers for tensors whose rows are not contiguous, and for
// accumulator rows on their way out.
class RowBuffers {
 public:
  // Accumulator rows unpacked at a time.
  static constexpr int64_t kUnpackRows = 32;

  // `tensors`: all that Read and Store are called with. Most calls have none
  // whose rows would need copying, and then there is nothing to copy to.
  // `non_temporal`: what Store writes will have left them when it is read next.
  RowBuffers(std::initializer_list<ConstTensorView> tensors, bool non_temporal,
             const simd::Engine& engine, const simd::RowKernels& kernels,
             int64_t largest_block, Carver* carver);

  // Rows [first, first + count) of a head, copied when not contiguous: at most
  // two such results are valid at a time (`slot` 0 and 1).
  simd::Rows Read(const ConstTensorView& view, int64_t batch, int64_t head,
                  int64_t first, int64_t count, int slot = 0) const {
    return ContiguousRows(view, batch, head, first, count, gathered_[slot]);
  }

  // Stores rows [0, count) of a key or query accumulator of a block of
  // `block_rows` rows, times `factor` and row_factor[row] (or nullptr). The
  // accumulator is the sum of `parts`, in order, and may be left in the first;
  // none: zeros.
  enum class Kind { kKeys, kQueries };
  struct Parts {
    void* data[std::max(kMaxSplits, kMaxParts)] = {};
    int count = 0;
    void Add(void* part) { data[count++] = part; }
  };
  void Store(const Parts& parts, Kind kind, int64_t block_rows, int64_t count,
             double factor, const void* row_factor, bool add,
             const TensorView& out, int64_t batch, int64_t head,
             int64_t first) const;

 private:
  const simd::Engine& engine_;
  const simd::RowKernels& kernels_;
  const bool non_temporal_;
  std::byte* gathered_[2];
  std::byte* rows_;
  std::byte* narrowed_;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_TENSORS_ROW_BUFFERS_H_
