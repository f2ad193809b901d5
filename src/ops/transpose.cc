// SPDX-License-Identifier: Apache-2.0

// Transposition of matrices, by tiles that are copied into L1 first: columns of
// a matrix whose row stride is a power of two all fall into the same few cache
// sets, and 64 rows of them do not fit there.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "fa2/training_ops.h"
#include "src/ops/arguments.h"
#include "src/ops/call.h"
#include "src/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/transpose.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

// Must come after foreach_target.h.
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "src/simd/math/transpose-inl.h"

#ifndef FA2_SRC_OPS_TRANSPOSE_ONCE_
#define FA2_SRC_OPS_TRANSPOSE_ONCE_
namespace fa2::ops {

struct TransposeJob {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  int64_t rows = 0, cols = 0;  // of `in`
  int64_t heads = 0;           // matrices of a batch
  int64_t in_strides[3] = {};  // bytes: batch, head, row
  int64_t out_strides[3] = {};
  int64_t item_rows = 0;  // columns of `out` an item
  int64_t item_cols = 0;
  int64_t row_items = 0, col_items = 0;
  size_t element = 0;  // bytes
  bool stream = false;
};

// Rows and columns of a tile: 256 bytes, four cache lines, of f32.
template <typename T>
constexpr size_t TileOf() {
  return sizeof(T) == 8 ? 32 : 64;
}

}  // namespace fa2::ops
#endif  // FA2_SRC_OPS_TRANSPOSE_ONCE_

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Vectors of up to 64 bytes; 16 where the length is not known when compiling.
#if HWY_HAVE_SCALABLE
template <typename T>
using TransposeTag = hn::FixedTag<T, 16 / sizeof(T)>;
#else
template <typename T>
using TransposeTag = hn::CappedTag<T, 64 / sizeof(T)>;
#endif

#if HWY_TARGET == HWY_SCALAR

template <typename T>
HWY_INLINE void TransposeVector(const T* in, size_t, T* out, int64_t out_stride,
                                size_t, int64_t cols, bool) {
  const auto n = std::min<int64_t>(cols, 16 / sizeof(T));
  for (int64_t c = 0; c < n; ++c) out[c * out_stride] = in[c];
}

#else

// Where a vector of a column goes: a full one, or the first `left` elements.
template <typename T>
HWY_INLINE void StoreColumn(hn::Vec<TransposeTag<T> > v, T* p, size_t left,
                            bool stream) {
  const TransposeTag<T> d;
  if (HWY_UNLIKELY(left < hn::Lanes(d))) {
    HWY_ALIGN T lanes[hn::MaxLanes(TransposeTag<T>())];
    hn::Store(v, d, lanes);
    std::memcpy(p, lanes, left * sizeof(T));
  } else if (stream) {
    hn::Stream(v, d, p);
  } else {
    hn::StoreU(v, d, p);
  }
}

// Columns [c, c + 16 bytes) of a vector of rows: 16-byte blocks transposed all
// at once by interleaving, log2(block) times. `out` is row c of the result.
template <typename T>
HWY_INLINE void TransposeVector(const T* in, size_t in_stride, T* out,
                                int64_t out_stride, size_t rows, int64_t cols,
                                bool stream) {
  const TransposeTag<T> d;
  const auto store = [&](int64_t col, hn::Vec<TransposeTag<T> > v) HWY_ATTR {
    if (col < cols) StoreColumn(v, out + col * out_stride, rows, stream);
  };
  // Block b has 16 bytes of row `row + b * 16 / sizeof(T)`, which are as far on
  // for each T: 16 * in_stride bytes, or 4 * in_stride floats.
  const auto load = [&](size_t row) HWY_ATTR {
    const hn::Repartition<float, TransposeTag<T> > d32;
    return hn::BitCast(
        d, simd::HWY_NAMESPACE::LoadColumnBlocks(
               d32, reinterpret_cast<const float*>(in + row * in_stride),
               static_cast<int64_t>(in_stride)));
  };
  if constexpr (sizeof(T) == 8) {
    const auto a0 = load(0);
    const auto a1 = load(1);
    store(0, hn::InterleaveLower(d, a0, a1));
    store(1, hn::InterleaveUpper(d, a0, a1));
  } else if constexpr (sizeof(T) == 4) {
    const auto a0 = load(0);
    const auto a1 = load(1);
    const auto a2 = load(2);
    const auto a3 = load(3);
    const auto b0 = hn::InterleaveLower(d, a0, a2);
    const auto b1 = hn::InterleaveLower(d, a1, a3);
    const auto b2 = hn::InterleaveUpper(d, a0, a2);
    const auto b3 = hn::InterleaveUpper(d, a1, a3);
    store(0, hn::InterleaveLower(d, b0, b1));
    store(1, hn::InterleaveUpper(d, b0, b1));
    store(2, hn::InterleaveLower(d, b2, b3));
    store(3, hn::InterleaveUpper(d, b2, b3));
  } else {
    static_assert(sizeof(T) == 2, "elements of 2, 4 or 8 bytes");
    const auto a0 = load(0);
    const auto a1 = load(1);
    const auto a2 = load(2);
    const auto a3 = load(3);
    const auto a4 = load(4);
    const auto a5 = load(5);
    const auto a6 = load(6);
    const auto a7 = load(7);
    const auto b0 = hn::InterleaveLower(d, a0, a4);
    const auto b1 = hn::InterleaveLower(d, a1, a5);
    const auto b2 = hn::InterleaveLower(d, a2, a6);
    const auto b3 = hn::InterleaveLower(d, a3, a7);
    const auto b4 = hn::InterleaveUpper(d, a0, a4);
    const auto b5 = hn::InterleaveUpper(d, a1, a5);
    const auto b6 = hn::InterleaveUpper(d, a2, a6);
    const auto b7 = hn::InterleaveUpper(d, a3, a7);
    const auto c0 = hn::InterleaveLower(d, b0, b2);
    const auto c1 = hn::InterleaveLower(d, b1, b3);
    const auto c2 = hn::InterleaveUpper(d, b0, b2);
    const auto c3 = hn::InterleaveUpper(d, b1, b3);
    const auto c4 = hn::InterleaveLower(d, b4, b6);
    const auto c5 = hn::InterleaveLower(d, b5, b7);
    const auto c6 = hn::InterleaveUpper(d, b4, b6);
    const auto c7 = hn::InterleaveUpper(d, b5, b7);
    store(0, hn::InterleaveLower(d, c0, c1));
    store(1, hn::InterleaveUpper(d, c0, c1));
    store(2, hn::InterleaveLower(d, c2, c3));
    store(3, hn::InterleaveUpper(d, c2, c3));
    store(4, hn::InterleaveLower(d, c4, c5));
    store(5, hn::InterleaveUpper(d, c4, c5));
    store(6, hn::InterleaveLower(d, c6, c7));
    store(7, hn::InterleaveUpper(d, c6, c7));
  }
}

#endif  // HWY_TARGET

// Fetches the tile that comes next into L2, a few lines for every few that are
// written: with 64 rows at once the hardware loses track of them, and memory
// would stand still while a tile is only written (18.5 -> 20.6 GB/s with a copy
// at 22).
template <typename T>
struct TileFetch {
  const std::byte* tile;
  int64_t stride;   // bytes from row to row
  size_t done = 0;  // bytes of the tile

  HWY_INLINE void Next(size_t bytes) {
    constexpr size_t kRowBytes = TileOf<T>() * sizeof(T);
    for (const size_t end = done + bytes; done < end;
         done += HWY_MIN(bytes, 64)) {
      __builtin_prefetch(tile +
                             static_cast<int64_t>(done / kRowBytes) * stride +
                             done % kRowBytes,
                         /*rw=*/0, /*locality=*/2);
    }
  }
};

// One item: rows [row0, row1) and columns [col0, col1), tile by tile.
template <typename T>
void TransposeTilesOf(const TransposeJob& job, int64_t item) {
  const TransposeTag<T> d;
  constexpr size_t kTile = TileOf<T>();
  // One cache line more than the tile: rows then start in different sets.
  constexpr size_t kStride = kTile + 64 / sizeof(T);
  HWY_ALIGN T tile[kTile * kStride];

  const int64_t col_item = item % job.col_items;
  const int64_t row_item = item / job.col_items % job.row_items;
  const int64_t matrix = item / (job.col_items * job.row_items);
  const std::byte* const in = job.in + matrix / job.heads * job.in_strides[0] +
                              matrix % job.heads * job.in_strides[1];
  std::byte* const out = job.out + matrix / job.heads * job.out_strides[0] +
                         matrix % job.heads * job.out_strides[1];

  // Tiles begin where rows of the output are aligned, so that whole cache lines
  // are written by non-temporal stores; the first one is that much shorter.
  const size_t bytes = hn::Lanes(d) * sizeof(T);
  const size_t past = reinterpret_cast<uintptr_t>(out) % bytes;
  const bool stream = job.stream && job.out_strides[2] % bytes == 0;
  const int64_t shift =
      stream ? static_cast<int64_t>((bytes - past) % bytes / sizeof(T)) : 0;
  // Rows of `in` in this item: the first item also takes the unaligned start.
  int64_t row = row_item * job.item_rows + (row_item == 0 ? 0 : shift);
  const int64_t row_end =
      std::min(job.rows, (row_item + 1) * job.item_rows + shift);
  const int64_t col_end = std::min(job.cols, (col_item + 1) * job.item_cols);
  while (row < row_end) {
    const bool head = row < shift;
    const auto rows = static_cast<size_t>(std::min<int64_t>(
        (head ? std::min(shift, row_end) : row_end) - row, kTile));
    for (int64_t col = col_item * job.item_cols; col < col_end; col += kTile) {
      const auto cols =
          static_cast<size_t>(std::min<int64_t>(col_end - col, kTile));
      const std::byte* from =
          in + row * job.in_strides[2] + col * static_cast<int64_t>(sizeof(T));
      for (size_t r = 0; r < rows; ++r, from += job.in_strides[2]) {
        T* HWY_RESTRICT to = tile + r * kStride;
        const T* HWY_RESTRICT line = reinterpret_cast<const T*>(from);
        if (HWY_LIKELY(cols == kTile)) {
          for (size_t c = 0; c < kTile; c += hn::Lanes(d)) {
            hn::Store(hn::LoadU(d, line + c), d, to + c);
          }
        } else {
          std::memcpy(to, line, cols * sizeof(T));
        }
      }
      T* const to = reinterpret_cast<T*>(out + col * job.out_strides[2]) + row;
      const auto out_stride =
          job.out_strides[2] / static_cast<int64_t>(sizeof(T));
      constexpr size_t kBlock = 16 / sizeof(T);
      const bool last = col + static_cast<int64_t>(kTile) >= col_end;
      TileFetch<T> fetch = {last ? from + (col_item * job.item_cols - col) *
                                              static_cast<int64_t>(sizeof(T))
                                 : in + row * job.in_strides[2] +
                                       (col + static_cast<int64_t>(kTile)) *
                                           static_cast<int64_t>(sizeof(T)),
                            job.in_strides[2]};
      for (size_t c = 0; c < cols; c += kBlock) {
        T* const column = to + static_cast<int64_t>(c) * out_stride;
        for (size_t r = 0; r < rows; r += hn::Lanes(d)) {
          fetch.Next(kBlock * hn::Lanes(d) * sizeof(T));
          TransposeVector(tile + r * kStride + c, kStride, column + r,
                          out_stride, rows - r, static_cast<int64_t>(cols - c),
                          stream && !head);
        }
      }
    }
    row += static_cast<int64_t>(rows);
  }
  hwy::FlushStream();
}

void TransposeTiles(const TransposeJob& job, int64_t item) {
  switch (job.element) {
    case 2:
      return TransposeTilesOf<uint16_t>(job, item);
    case 4:
      return TransposeTilesOf<uint32_t>(job, item);
    default:
      return TransposeTilesOf<uint64_t>(job, item);
  }
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/simd/target.h"

namespace fa2 {
namespace ops {
namespace {

HWY_EXPORT(TransposeTiles);

Status Run(const ConstTensorView& in, const TensorView& out,
           const Context& context) {
  const std::initializer_list<DType> types = {DType::kF32, DType::kBF16,
                                              DType::kF16, DType::kF64,
                                              DType::kI32, DType::kI64};
  FA2_RETURN_IF_ERROR(CheckRows({"in", in}, types));
  FA2_RETURN_IF_ERROR(CheckRows({"out", out}, types));
  FA2_RETURN_IF_ERROR(CheckType({"out", out}, {"in", in}));
  FA2_RETURN_IF_ERROR(CheckShape(
      {"out", out}, {in.sizes[0], in.sizes[1], in.sizes[3], in.sizes[2]},
      "the shape of in with its last two sizes swapped"));
  FA2_RETURN_IF_ERROR(CheckOverlap({{"out", out}}, {{"in", in}}));
  if (Elements(in) == 0) return Status::Ok();

  TransposeJob job;
  job.in = static_cast<const std::byte*>(in.data);
  job.out = static_cast<std::byte*>(out.data);
  job.rows = in.sizes[2];
  job.cols = in.sizes[3];
  job.heads = in.sizes[1];
  job.element = SizeOf(in.dtype);
  const auto size = static_cast<int64_t>(job.element);
  for (int dim = 0; dim < 3; ++dim) {
    job.in_strides[dim] = in.strides[dim] * size;
    job.out_strides[dim] = out.strides[dim] * size;
  }
  job.stream = WriteNonTemporal(Bytes(in));
  // Items of 512 x 512: the pages of their 1,024 rows, in and out, stay in the
  // second-level TLB (2,048 entries) from tile to tile. Smaller ones where
  // there would be few of them.
  constexpr int64_t kItem = 512;
  constexpr int64_t kItemsPerThread = 8;
  job.item_cols = kItem;
  job.item_rows = Elements(in) / (kItem * kItem) >=
                          kItemsPerThread * context.impl().pool().num_threads()
                      ? kItem
                      : 64;
  job.row_items = CeilDiv(job.rows, job.item_rows);
  job.col_items = CeilDiv(job.cols, job.item_cols);
  const int64_t items =
      in.sizes[0] * in.sizes[1] * job.row_items * job.col_items;
  const auto kernel =
      FA2_TARGET_FUNCTION(TransposeTiles, context.impl().targets());
  context.impl().pool().For(
      items,
      [kernel, &job](int64_t item, int /*worker*/) { kernel(job, item); });
  return Status::Ok();
}

}  // namespace
}  // namespace ops

Status Transpose2d(const ConstTensorView& in, const TensorView& out,
                   Context* given) {
  return ops::Call("transpose", in, given, [&](Context& context) {
    return ops::Run(in, out, context);
  });
}

}  // namespace fa2
#endif  // HWY_ONCE
