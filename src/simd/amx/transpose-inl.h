// SPDX-License-Identifier: Apache-2.0

// Transposition of 16 x 16 32-bit elements (or pairs of bf16) for the AMX
// engines, in registers and from memory.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_TRANSPOSE_INL_H_
#define FA2_SRC_SIMD_AMX_TRANSPOSE_INL_H_

#include <cstdint>

#include "src/simd/amx/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// 64-bit halves of blocks by turns.
HWY_INLINE Floats LowerHalves(Floats a, Floats b) {
  const hn::FixedTag<double, 8> d;
  return hn::BitCast(
      FloatTag(), hn::InterleaveLower(d, hn::BitCast(d, a), hn::BitCast(d, b)));
}
HWY_INLINE Floats UpperHalves(Floats a, Floats b) {
  const hn::FixedTag<double, 8> d;
  return hn::BitCast(
      FloatTag(), hn::InterleaveUpper(d, hn::BitCast(d, a), hn::BitCast(d, b)));
}

// Blocks of four rows, transposed: columns[i] is column i of each block.
HWY_INLINE void TransposeBlocks(Floats r0, Floats r1, Floats r2, Floats r3,
                                Floats (&columns)[4]) {
  const FloatTag d;
  const Floats low01 = hn::InterleaveLower(d, r0, r1);
  const Floats low23 = hn::InterleaveLower(d, r2, r3);
  const Floats high01 = hn::InterleaveUpper(d, r0, r1);
  const Floats high23 = hn::InterleaveUpper(d, r2, r3);
  columns[0] = LowerHalves(low01, low23);
  columns[1] = UpperHalves(low01, low23);
  columns[2] = LowerHalves(high01, high23);
  columns[3] = UpperHalves(high01, high23);
}

// Transposes 16 x 16 32-bit elements held in 16 vectors.
HWY_INLINE void Transpose16x16(Floats (&r)[16]) {
  // Rows 4 b to 4 b + 3: columns i, 4 + i, 8 + i and 12 + i.
  Floats blocks[4][4];
  for (int b = 0; b < 4; ++b) {
    TransposeBlocks(r[4 * b], r[4 * b + 1], r[4 * b + 2], r[4 * b + 3],
                    blocks[b]);
  }
  for (int i = 0; i < 4; ++i) {
    const Floats upper_even = EvenBlocks(blocks[0][i], blocks[1][i]);
    const Floats upper_odd = OddBlocks(blocks[0][i], blocks[1][i]);
    const Floats lower_even = EvenBlocks(blocks[2][i], blocks[3][i]);
    const Floats lower_odd = OddBlocks(blocks[2][i], blocks[3][i]);
    r[i] = EvenBlocks(upper_even, lower_even);
    r[8 + i] = OddBlocks(upper_even, lower_even);
    r[4 + i] = EvenBlocks(upper_odd, lower_odd);
    r[12 + i] = OddBlocks(upper_odd, lower_odd);
  }
}

// v[c] becomes column c of 16 rows in memory, `stride` bytes apart.
HWY_INLINE void LoadColumns(const void* rows, int64_t stride, Floats (&v)[16]) {
  // Halves of rows i and i + 4 side by side, i + 8 and i + 12. Both halves of a
  // line are read at once: rows a multiple of 4 KiB apart share a set of L1.
  for (int r = 0; r < 8; ++r) {
    const auto half = [rows, stride](int row, int h) HWY_ATTR {
      return hn::LoadU(
          hn::FixedTag<float, 8>(),
          reinterpret_cast<const float*>(static_cast<const uint8_t*>(rows) +
                                         row * stride + 32 * h));
    };
    const int row = r + r / 4 * 4;
    for (int h = 0; h < 2; ++h) {
      v[8 * h + r] = hn::Combine(FloatTag(), half(row + 4, h), half(row, h));
    }
  }
  for (int h = 0; h < 2; ++h) {
    // Columns x and x + 4 by blocks of four rows: 0, 4 and then 8, 12.
    Floats column[2][4];
    for (int b = 0; b < 2; ++b) {
      const Floats* r = v + 8 * h + 4 * b;
      TransposeBlocks(r[0], r[1], r[2], r[3], column[b]);
    }
    for (int x = 0; x < 4; ++x) {
      v[8 * h + x] = EvenBlocks(column[0][x], column[1][x]);
      v[8 * h + 4 + x] = OddBlocks(column[0][x], column[1][x]);
    }
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_TRANSPOSE_INL_H_
