// SPDX-License-Identifier: Apache-2.0

// Accumulators of the AMX engines on their way out: as rows of f32, or scaled,
// rounded and stored as rows of bf16. Layouts: amx/layout.h.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_UNPACK_INL_H_
#define FA2_SRC_SIMD_AMX_UNPACK_INL_H_

#include <algorithm>
#include <utility>

#include "src/simd/amx/pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

inline constexpr int64_t kTileFloats = kTileBytes / 4;

inline void UnpackKeyRows(const void* accumulator, int64_t /*keys*/,
                          int64_t depth, int64_t first, int64_t count,
                          void* rows, int64_t row_stride) {
  const FloatTag d16;
  const int64_t columns = 2 * amx::DepthTiles(depth);
  const float* tiles = static_cast<const float*>(accumulator);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = first + r;
    float* out = static_cast<float*>(rows) + r * row_stride;
    for (int64_t d = 0; 16 * d < depth; ++d) {
      const auto x =
          hn::Load(d16, tiles + ((row / 16) * columns + d) * kTileFloats +
                            row % 16 * 16);
      const int64_t left = depth - 16 * d;
      if (left >= 16) {
        hn::StoreU(x, d16, out + 16 * d);
      } else {
        hn::BlendedStore(x, hn::FirstN(d16, static_cast<size_t>(left)), d16,
                         out + 16 * d);
      }
    }
  }
}

inline void UnpackQueryRows(const void* accumulator, int64_t /*queries*/,
                            int64_t depth, int64_t first, int64_t count,
                            void* rows, int64_t row_stride) {
  const FloatTag d16;
  const int64_t columns = 2 * amx::DepthTiles(depth);
  const uint8_t* tiles = static_cast<const uint8_t*>(accumulator);
  for (int64_t panel = first / 32; 32 * panel < first + count; ++panel) {
    for (int64_t d = 0; 16 * d < depth; ++d) {
      const auto mask = hn::FirstN(
          d16, static_cast<size_t>(std::min<int64_t>(16, depth - 16 * d)));
      for (int64_t half = 0; half < 2; ++half) {
        const uint8_t* tile =
            tiles + ((panel * columns + d) * 2 + half) * kTileBytes;
        Floats v[16];
        LoadColumns(tile, 64, v);
        for (int i = 0; i < 16; ++i) {
          const int64_t r = 32 * panel + amx::QueryOfLane(half, i) - first;
          if (r < 0 || r >= count) continue;
          hn::BlendedStore(v[i], mask, d16,
                           static_cast<float*>(rows) + r * row_stride + 16 * d);
        }
      }
    }
  }
}

// Stores `columns` of 32 bf16 from a column on; a whole line by a non-temporal
// store if wanted (one thread: N 1,024 4 to 5% of the backward, N 2,048 3%).
HWY_INLINE void StoreColumns(const MutableRows& out, int64_t row,
                             int64_t column, uint32_t columns, Bf16s x) {
  const Bf16Tag d16;
  uint16_t* const to =
      static_cast<uint16_t*>(out.data) + row * out.stride + column;
  const bool whole_line =
      columns == ~uint32_t{0} && reinterpret_cast<uintptr_t>(to) % 64 == 0;
  if (out.non_temporal && whole_line) {
    hn::Stream(x, d16, to);
  } else {
    hn::BlendedStore(x, Bf16MaskOf(columns), d16, to);
  }
}

// Non-temporal stores are not ordered with later ones: whoever is told that the
// rows are written must see them.
HWY_INLINE void FinishStores(const MutableRows& out) {
  if (out.non_temporal) hwy::FlushStream();
}

// 16 numbers at `offset` bytes of the sum of accumulators.
HWY_INLINE Floats LoadSum(const void* const* accumulators, int parts,
                          int64_t offset) {
  const auto load = [accumulators, offset](int part) HWY_ATTR {
    return LoadRow(static_cast<const uint8_t*>(accumulators[part]) + offset);
  };
  Floats sum = load(0);
  for (int part = 1; part < parts; ++part) sum = hn::Add(sum, load(part));
  return sum;
}

// Rounding takes what is below 2^-126 for 0, as tile products do.
template <class Tiles>
void StoreKeyRows(const void* const* accumulators, int parts, int64_t depth,
                  int64_t count, float factor, const void* row_factor,
                  MutableRows out) {
  const int64_t columns = 2 * amx::DepthTiles(depth);
  const float* const factors = static_cast<const float*>(row_factor);
  for (int64_t first = 0; first < count; first += 16) {
    const int64_t rows = std::min<int64_t>(16, count - first);
    for (int64_t d = 0; 16 * d < depth; d += 2) {
      const int64_t tile = (first / 16 * columns + d) * kTileBytes;
      const uint32_t there = ColumnBits(depth, 16 * d);
      for (int64_t i = 0; i < rows; ++i) {
        const Floats scale =
            hn::Set(FloatTag(),
                    factors == nullptr ? factor : factor * factors[first + i]);
        const int64_t row = tile + 64 * i;
        const Bf16s x = Tiles::RoundToBf16(
            hn::Mul(LoadSum(accumulators, parts, row), scale),
            hn::Mul(LoadSum(accumulators, parts, row + kTileBytes), scale));
        StoreColumns(out, first + i, 16 * d, there, x);
      }
    }
  }
  FinishStores(out);
}

// Columns 2 i and 2 i + 1, for each i of kPairs, of the 16 queries whose tiles
// begin at byte `tile`, rounded, side by side. Not a loop: GCC 12 would take
// the pairs through memory (64 rows of 160: 1.07 of the cycles to store them).
template <class Tiles, int... kPairs>
HWY_INLINE void RoundPairs(const void* const* accumulators, int parts,
                           int64_t tile, Floats scale, Floats (&pairs)[16],
                           std::integer_sequence<int, kPairs...>) {
  const auto round = [&](int i) HWY_ATTR {
    const int64_t pair = tile + i / 8 * 2 * kTileBytes + i % 8 * 128;
    return hn::BitCast(
        FloatTag(),
        InterleaveHalves(Tiles::RoundToBf16(
            hn::Mul(LoadSum(accumulators, parts, pair), scale),
            hn::Mul(LoadSum(accumulators, parts, pair + 64), scale))));
  };
  ((pairs[kPairs] = round(kPairs)), ...);
}

// Pairs of rounded columns are transposed, half as much as columns of f32.
template <class Tiles>
void StoreQueryRows(const void* const* accumulators, int parts, int64_t depth,
                    int64_t count, float factor, const void* row_factor,
                    MutableRows out) {
  const int64_t columns = 2 * amx::DepthTiles(depth);
  for (int64_t panel = 0; 32 * panel < count; ++panel) {
    const int64_t rows = std::min<int64_t>(32, count - 32 * panel);
    for (int64_t half = 0; half < 2; ++half) {
      alignas(64) float lanes[16];
      for (int i = 0; i < 16; ++i) {
        const int64_t r = amx::QueryOfLane(half, i);
        lanes[i] = row_factor == nullptr || r >= rows
                       ? factor
                       : factor * static_cast<const float*>(
                                      row_factor)[32 * panel + r];
      }
      const Floats scale = LoadRow(lanes);
      for (int64_t d = 0; 16 * d < depth; d += 2) {
        const int64_t tile = ((panel * columns + d) * 2 + half) * kTileBytes;
        Floats v[16];
        RoundPairs<Tiles>(accumulators, parts, tile, scale, v,
                          std::make_integer_sequence<int, 16>());
        Transpose16x16(v);
        const uint32_t there = ColumnBits(depth, 16 * d);
        for (int i = 0; i < 16; ++i) {
          const int64_t r = amx::QueryOfLane(half, i);
          if (r >= rows) continue;
          StoreColumns(out, 32 * panel + r, 16 * d, there,
                       hn::BitCast(Bf16Tag(), v[i]));
        }
      }
    }
  }
  FinishStores(out);
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_UNPACK_INL_H_
