// SPDX-License-Identifier: Apache-2.0

// Rows of a strided array as the kernels see them, and how they are shared out
// among workers.
#ifndef FA2_SRC_OPS_ROWS_H_
#define FA2_SRC_OPS_ROWS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fa2/types.h"
#include "src/common/integers.h"

namespace fa2::ops {

// Row i of [.., .., rows, dim], rows counted through all leading dimensions.
class RowArray {
 public:
  RowArray() = default;
  explicit RowArray(const ConstTensorView& x)
      : data_(const_cast<std::byte*>(static_cast<const std::byte*>(x.data))),
        inner_(std::max<int64_t>(1, x.sizes[2])),
        middle_(std::max<int64_t>(1, x.sizes[1])) {
    const auto size = static_cast<int64_t>(SizeOf(x.dtype));
    // The stride of a dimension of one element may be any number.
    for (int d = 0; d < 3; ++d) {
      if (x.sizes[d] > 1) strides_[d] = x.strides[d] * size;
    }
  }

  template <typename T>
  const T* In(int64_t row) const {
    return reinterpret_cast<const T*>(data_ + Offset(row));
  }
  template <typename T>
  T* Out(int64_t row) const {
    return reinterpret_cast<T*>(data_ + Offset(row));
  }

  // Rows [i * RunLength(), (i + 1) * RunLength()) are RowStride() bytes apart.
  int64_t RunLength() const { return inner_; }
  int64_t RowStride() const { return strides_[2]; }

 private:
  int64_t Offset(int64_t row) const {
    if (row < inner_) return row * strides_[2];
    const int64_t outer = row / inner_;
    return (row - outer * inner_) * strides_[2] +
           (outer % middle_) * strides_[1] + (outer / middle_) * strides_[0];
  }

  std::byte* data_ = nullptr;
  int64_t inner_ = 1;
  int64_t middle_ = 1;
  int64_t strides_[3] = {0, 0, 0};  // bytes
};

// Rows [begin, end) of item `item` when rows are cut into pieces of `rows`.
struct RowRange {
  int64_t begin;
  int64_t end;
};
inline RowRange ItemRows(int64_t item, int64_t rows_per_item, int64_t rows) {
  return {item * rows_per_item, std::min(rows, (item + 1) * rows_per_item)};
}

// Rows an item: about 128 KiB of a row array, some 10 us of memory traffic,
// which hides the cost of fetching an item.
inline int64_t RowsPerItem(int64_t dim, DType dtype) {
  constexpr int64_t kItemBytes = 128 * 1024;
  const int64_t row_bytes =
      std::max<int64_t>(1, dim) * static_cast<int64_t>(SizeOf(dtype));
  return std::max<int64_t>(1, kItemBytes / row_bytes);
}

// Rows an item where the arithmetic of a row goes on while the one before is
// written, which the ends of an item cannot: about 1 MiB and at least 16 rows,
// but 8 items a thread so that they end together.
inline int64_t PipelinedRowsPerItem(int64_t rows, int64_t dim, DType dtype,
                                    int num_threads) {
  const int64_t most = std::max<int64_t>(16, 8 * RowsPerItem(dim, dtype));
  return std::clamp<int64_t>(rows / (8 * num_threads), 1, most);
}

// Whether an output of so many bytes is written by non-temporal stores: it will
// not be in them when it is read next, and lines need not be read before they
// are written. 8 MiB is what a core of a server has as its share of L2 and L3.
constexpr bool WriteNonTemporal(int64_t bytes) { return bytes >= 8 << 20; }

}  // namespace fa2::ops

#endif  // FA2_SRC_OPS_ROWS_H_
