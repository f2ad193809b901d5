// SPDX-License-Identifier: Apache-2.0

// Accumulators of LaneEngine on their way out: scaled, rounded and stored as
// rows of bf16 in one pass.

// Included for one Highway target only, bf16dot_target.h.
#ifndef FA2_SRC_SIMD_LANE_BF16_ROWS_INL_H_
#define FA2_SRC_SIMD_LANE_BF16_ROWS_INL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "src/simd/lane/bf16_pairs-inl.h"
#include "src/simd/lane/engine-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows of the sum of `parts` accumulators (Engine::StoreBf16).
struct Bf16RowStore {
  using D = EngineTag<float>;
  using V = hn::Vec<D>;
  static constexpr size_t kLanes = hn::MaxLanes(D());
  static_assert(kSquare == kLanes);
  static constexpr size_t kWidth = kBlockVectors * kLanes;  // of a panel
  static constexpr size_t kGrain = 2 * kLanes;              // QueryGrain
  // Columns of query rows that are summed and transposed at a time, and those
  // that are stored at a time: 256 bytes, since the caller's memory takes whole
  // lines of a row one after another better than one of each row.
  static constexpr size_t kColumns = 2 * kLanes;
  static constexpr size_t kPart = 128;

  static HWY_INLINE V LoadSum(D d, const void* const* accumulators, int parts,
                              size_t at) {
    V sum = hn::Load(d, static_cast<const float*>(accumulators[0]) + at);
    for (int i = 1; i < parts; ++i) {
      sum = hn::Add(
          sum, hn::Load(d, static_cast<const float*>(accumulators[i]) + at));
    }
    return sum;
  }

  // The first `count` of a vector.
  static HWY_INLINE void StoreSome(D /*d*/, Bf16Vec<D> x, size_t count,
                                   uint16_t* HWY_RESTRICT out) {
    const hn::Repartition<uint16_t, D> d16;
    if (count >= hn::Lanes(d16)) {
      hn::StoreU(x, d16, out);
    } else {
      HWY_ALIGN uint16_t tail[HWY_MAX_BYTES / sizeof(uint16_t)];
      hn::Store(x, d16, tail);
      std::copy_n(tail, count, out);
    }
  }

  static void KeyRows(const void* const* accumulators, int parts, int64_t depth,
                      int64_t count, float factor, const void* row_factor,
                      MutableRows destination) {
    const D d;
    uint16_t* out = static_cast<uint16_t*>(destination.data);
    const size_t columns = static_cast<size_t>(depth);
    const size_t row_stride = RowStride(d, columns);
    const float* const factors = static_cast<const float*>(row_factor);
    for (int64_t r = 0; r < count; ++r, out += destination.stride) {
      const V scale =
          hn::Set(d, factors == nullptr ? factor : factor * factors[r]);
      const size_t row = static_cast<size_t>(r) * row_stride;
      for (size_t c = 0; c < columns; c += 2 * kLanes) {
        const V low = LoadSum(d, accumulators, parts, row + c);
        const V high = c + kLanes < columns
                           ? LoadSum(d, accumulators, parts, row + c + kLanes)
                           : hn::Zero(d);
        StoreSome(d, RoundTwo(d, hn::Mul(low, scale), hn::Mul(high, scale)),
                  columns - c, out + c);
      }
    }
  }

  // kColumns columns of a panel, [column][width], as rows of bf16 that are
  // kPart long. Pairs of rounded columns are transposed, half as much as
  // columns of f32.
  static HWY_INLINE void Turn(D d, const float* HWY_RESTRICT columns,
                              const float* HWY_RESTRICT scales, size_t width,
                              size_t rows, uint16_t* HWY_RESTRICT turned) {
    HWY_ALIGN uint32_t pairs[kLanes * kLanes];
    for (size_t r = 0; r < rows; r += kLanes) {
      const V scale = hn::Load(d, scales + r);
      for (size_t i = 0; i < kLanes; ++i) {
        const float* const even = columns + 2 * i * width + r;
        const auto rounded =
            RoundTwo(d, hn::Mul(hn::Load(d, even), scale),
                     hn::Mul(hn::Load(d, even + width), scale));
        hn::Store(InterleaveHalves(d, rounded), hn::RebindToUnsigned<D>(),
                  pairs + i * kLanes);
      }
      Transpose(pairs, kLanes, kLanes, kLanes,
                reinterpret_cast<uint32_t*>(turned + r * kPart), kPart / 2);
    }
  }

  static void QueryRows(const void* const* accumulators, int parts,
                        int64_t depth, int64_t count, float factor,
                        const void* row_factor, MutableRows destination) {
    const D d;
    const hn::Repartition<uint16_t, D> d16;
    uint16_t* out = static_cast<uint16_t*>(destination.data);
    const int64_t stride = destination.stride;
    const size_t all_columns = static_cast<size_t>(depth);
    const size_t all_rows = static_cast<size_t>(count);
    HWY_ALIGN float sums[kColumns * kWidth];
    HWY_ALIGN uint16_t turned[kWidth * kPart];
    HWY_ALIGN float scales[kWidth];
    for (size_t first = 0; first < all_rows;
         first += kWidth, out += static_cast<int64_t>(kWidth) * stride) {
      const size_t rows = std::min(kWidth, all_rows - first);
      const size_t width = std::min(kWidth, RoundUp(all_rows - first, kGrain));
      std::fill_n(scales, kWidth, factor);
      for (size_t r = 0; row_factor != nullptr && r < rows; ++r) {
        scales[r] *= static_cast<const float*>(row_factor)[first + r];
      }
      for (size_t c0 = 0; c0 < all_columns; c0 += kPart) {
        const size_t part = std::min(kPart, all_columns - c0);
        for (size_t c = 0; c < part; c += kColumns) {
          // The lines to be written, meanwhile.
          for (size_t r = 0; r < rows; ++r) {
            hwy::Prefetch(out + static_cast<int64_t>(r) * stride + c0 + c);
          }
          const size_t columns = std::min(kColumns, part - c);
          const size_t at = first * all_columns + (c0 + c) * width;
          for (size_t i = 0; i < columns * width; i += kLanes) {
            hn::Store(LoadSum(d, accumulators, parts, at + i), d, sums + i);
          }
          std::fill(sums + columns * width, sums + kColumns * width, 0.0f);
          Turn(d, sums, scales, width, rows, turned + c);
        }
        for (size_t r = 0; r < rows; ++r) {
          uint16_t* const to = out + static_cast<int64_t>(r) * stride + c0;
          for (size_t c = 0; c < part; c += kColumns) {
            StoreSome(d, hn::Load(d16, turned + r * kPart + c), part - c,
                      to + c);
          }
        }
      }
    }
  }

  static constexpr Engine::StoreBf16 kKeyRows = KeyRows;
  static constexpr Engine::StoreBf16 kQueryRows = QueryRows;
};

template <size_t kTerms>
struct RowStore<Bf16Pairs<kTerms>> : Bf16RowStore {};
template <>
struct RowStore<Bf16ScorePairs> : Bf16RowStore {};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_LANE_BF16_ROWS_INL_H_
