// SPDX-License-Identifier: Apache-2.0

// Transposition of 16 x 16 32-bit elements (or pairs of bf16) for the AMX
// engines, in registers and from memory.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_TRANSPOSE_INL_H_
#define FA2_SRC_SIMD_AMX_TRANSPOSE_INL_H_

#include <immintrin.h>

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Transposes 16 x 16 32-bit elements held in 16 vectors.
HWY_INLINE void Transpose16x16(__m512i* HWY_RESTRICT r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// v[c] becomes column c of 16 rows in memory, `stride` bytes apart.
HWY_INLINE void LoadColumns(const void* rows, int64_t stride, __m512 (&v)[16]) {
  // Halves of rows i and i + 4 side by side, i + 8 and i + 12. Both halves of a
  // line are read at once: rows a multiple of 4 KiB apart share a set of L1.
  for (int r = 0; r < 8; ++r) {
    const auto half = [rows, stride](int row, int h) HWY_ATTR {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(
          static_cast<const uint8_t*>(rows) + row * stride + 32 * h));
    };
    const int row = r + r / 4 * 4;
    for (int h = 0; h < 2; ++h) {
      v[8 * h + r] = _mm512_insertf32x8(_mm512_castps256_ps512(half(row, h)),
                                        half(row + 4, h), 1);
    }
  }
  for (int h = 0; h < 2; ++h) {
    // Columns x and x + 4 by blocks of four rows: 0, 4 and then 8, 12.
    __m512d column[2][4];
    for (int b = 0; b < 2; ++b) {
      const __m512* r = v + 8 * h + 4 * b;
      const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1]));
      const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
      const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
      const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
      column[b][0] = _mm512_unpacklo_pd(low01, low23);
      column[b][1] = _mm512_unpackhi_pd(low01, low23);
      column[b][2] = _mm512_unpacklo_pd(high01, high23);
      column[b][3] = _mm512_unpackhi_pd(high01, high23);
    }
    for (int x = 0; x < 4; ++x) {
      const __m512 a = _mm512_castpd_ps(column[0][x]);
      const __m512 b = _mm512_castpd_ps(column[1][x]);
      v[8 * h + x] = _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0));
      v[8 * h + 4 + x] = _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1));
    }
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_TRANSPOSE_INL_H_
