// SPDX-License-Identifier: Apache-2.0

// Which elements of a sub-block of 32 keys x 32 queries are visible, as bits:
// by the range of keys that each query sees and by a mask.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_VISIBLE_BITS_INL_H_
#define FA2_SRC_SIMD_AMX_VISIBLE_BITS_INL_H_

#include <immintrin.h>

#include <cstdint>

#include "src/simd/amx/stream-inl.h"
#include "src/simd/amx/visibility.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/mask_scan.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// For each of 32 keys those of queries 0-15, then of 16-31.
inline constexpr int kVisibleWords = 2 * 32;

// For each of 16 queries the keys from `begin`, in rows of the block, on; bit 0
// is key `first`.
HWY_INLINE __m512i KeysFrom(const float* begin, int64_t first) {
  const __m512i at =
      _mm512_sub_epi32(_mm512_cvttps_epi32(_mm512_loadu_ps(begin)),
                       _mm512_set1_epi32(static_cast<int>(first)));
  // A shift by 32 and more leaves nothing.
  return _mm512_sllv_epi32(_mm512_set1_epi32(-1),
                           _mm512_max_epi32(at, _mm512_setzero_si512()));
}

// Those of up to 32 keys side by side that a mask shows.
HWY_INLINE uint32_t ShownKeys(const uint8_t* row, DType dtype,
                              __mmask32 there) {
  const uint64_t hides = HidingBits(dtype);
  switch (SizeOf(dtype)) {
    case 1: {
      const __m256i elements = _mm256_maskz_loadu_epi8(there, row);
      return _mm256_test_epi8_mask(elements, elements);
    }
    case 2:
      return _mm512_mask_cmpneq_epi16_mask(
          there, _mm512_maskz_loadu_epi16(there, row),
          _mm512_set1_epi16(static_cast<short>(hides)));
    default: {
      const __m512i hiding = _mm512_set1_epi32(static_cast<int>(hides));
      uint32_t shown = 0;
      for (int half = 0; half < 2; ++half) {
        const __mmask16 part = static_cast<__mmask16>(there >> 16 * half);
        const __m512i elements =
            _mm512_maskz_loadu_epi32(part, row + 64 * half);
        shown |= static_cast<uint32_t>(
                     _mm512_mask_cmpneq_epi32_mask(part, elements, hiding))
                 << 16 * half;
      }
      return shown;
    }
  }
}

// For each of 32 queries the keys that a mask shows.
inline void MaskedKeys(const StreamPart& part, uint32_t* keys) {
  const ScoreMatrix& m = part.matrix;
  const int64_t size = static_cast<int64_t>(SizeOf(m.dtype));
  const uint8_t* row = static_cast<const uint8_t*>(m.data);
  const __mmask32 there =
      static_cast<__mmask32>((uint64_t{1} << part.shape.keys) - 1);
  for (int64_t q = 0; q < 32; ++q) {
    keys[q] = 0;
    if (q >= part.shape.queries) continue;
    if (m.key_stride == 1 && size <= 4) {
      keys[q] = ShownKeys(row, m.dtype, there);
    } else {
      for (int64_t k = 0; k < part.shape.keys; ++k) {
        if (!Hides(row + k * m.key_stride * size, m.dtype)) {
          keys[q] |= uint32_t{1} << k;
        }
      }
    }
    row += m.query_stride * size;
  }
}

// The bits of sub-block `sub`, at (key, query), both in panels.
inline HWY_NOINLINE void VisibleBits(const SubBlock& sub, const ScoreOptions& o,
                                     int64_t key, int64_t query,
                                     uint16_t* bits) {
  uint32_t all = 0, some = 0;  // keys, by the state of their tile
  for (int half = 0; half < 2; ++half) {
    const uint32_t keys = 0xFFFFu << 16 * half;
    if (sub.half[half] == TileState::kVisible) all |= keys;
    if (sub.half[half] == TileState::kPartial) some |= keys;
  }
  alignas(64) uint32_t masked[32];
  const bool by_mask = some != 0 && o.mask_stream.given();
  if (by_mask) MaskedKeys(StreamPart(o.mask_stream, key, query), masked);
  for (int half = 0; half < 2; ++half) {
    __m512i keys = _mm512_setzero_si512();
    if (some != 0) {
      const int64_t column = 32 * query + 16 * half;
      keys = _mm512_andnot_si512(
          KeysFrom(static_cast<const float*>(o.visible_end) + column, 32 * key),
          KeysFrom(static_cast<const float*>(o.visible_begin) + column,
                   32 * key));
    }
    if (by_mask) {
      keys = _mm512_and_si512(keys, _mm512_load_si512(masked + 16 * half));
    }
    keys = _mm512_or_si512(
        _mm512_and_si512(keys, _mm512_set1_epi32(static_cast<int>(some))),
        _mm512_set1_epi32(static_cast<int>(all)));
    __m512i bit = _mm512_set1_epi32(1);
    for (int k = 0; k < 32; ++k) {
      bits[2 * k + half] = _mm512_test_epi32_mask(keys, bit);
      bit = _mm512_add_epi32(bit, bit);
    }
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_VISIBLE_BITS_INL_H_
