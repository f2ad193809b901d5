// SPDX-License-Identifier: Apache-2.0

// Packing of operands into tiles for the AMX engines. Layouts: amx/layout.h.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_PACK_INL_H_
#define FA2_SRC_SIMD_AMX_PACK_INL_H_

#include "src/simd/amx/layout.h"
#include "src/simd/amx/tile-inl.h"
#include "src/simd/amx/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// The upper 16 bits of x, which is left with the rest. What is left of an
// infinite x is NaN.
struct UpperBits {
  static HWY_INLINE __m512 TakeFrom(__m512& x) {
    const __m512 taken = _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(x),
                         _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    x = _mm512_sub_ps(x, taken);
    return taken;
  }
};

// x to bf16, half up, which leaves half as much as cutting it off, of both
// signs. Nothing is left of a non-finite number, so that it keeps its own
// value.
struct NearestBf16 {
  static HWY_INLINE __m512 TakeFrom(__m512& x) {
    // Quiet NaN, infinities, signalling NaN.
    const __mmask16 finite =
        _knot_mask16(_mm512_fpclass_ps_mask(x, 0x01 | 0x08 | 0x10 | 0x80));
    const __m512i bits = _mm512_castps_si512(x);
    const __m512 taken = _mm512_castsi512_ps(_mm512_mask_and_epi32(
        bits, finite, _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)),
        _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    x = _mm512_maskz_sub_ps(finite, x, taken);
    return taken;
  }
};

// 32 numbers as a sum of kTerms bf16 vectors, most significant first. First:
// how all terms but the last are taken: of inputs NearestBf16; of P and dS
// UpperBits, in the fewest operations, since the fused passes wait for them.
template <class Tiles, int kTerms, class First>
HWY_INLINE void SplitTerms(__m512 low, __m512 high,
                           __m512i* HWY_RESTRICT terms) {
  for (int t = 0; t + 1 < kTerms; ++t) {
    const __m512 low_term = First::TakeFrom(low);
    const __m512 high_term = First::TakeFrom(high);
    terms[t] = Tiles::RoundToBf16(low_term, high_term);
  }
  terms[kTerms - 1] = Tiles::RoundToBf16(low, high);
}

// 32 columns from `column` on, those that there are.
HWY_INLINE __mmask32 ColumnMask(int64_t depth, int64_t column) {
  const int64_t left = depth - column;
  return left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
}

// Reads up to 32 elements of a row as bf16 terms; the rest are 0. Elements
// that are NaN or infinite clear *finite and, with kFiniteOnly, become 0.
template <class Tiles, int kTerms, bool kFiniteOnly>
struct RowReader {
  static HWY_INLINE void Read(const uint16_t* row, DType dtype,
                              __mmask32 columns, __m512i* HWY_RESTRICT terms,
                              __mmask32& non_finite) {
    const __m512i x = _mm512_maskz_loadu_epi16(columns, row);
    // All exponent bits set.
    const __m512i exponent =
        _mm512_set1_epi16(dtype == DType::kBF16 ? 0x7f80 : 0x7c00);
    const __mmask32 bad =
        _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
    non_finite |= bad;
    const __m512i kept =
        kFiniteOnly ? _mm512_maskz_mov_epi16(static_cast<__mmask32>(~bad), x)
                    : x;
    if (dtype == DType::kBF16) {
      terms[0] = kept;
      for (int t = 1; t < kTerms; ++t) terms[t] = _mm512_setzero_si512();
    } else {
      SplitTerms<Tiles, kTerms, NearestBf16>(
          _mm512_cvtph_ps(_mm512_castsi512_si256(kept)),
          _mm512_cvtph_ps(_mm512_extracti64x4_epi64(kept, 1)), terms);
    }
  }
  static HWY_INLINE void Read(const float* row, DType, __mmask32 columns,
                              __m512i* HWY_RESTRICT terms,
                              __mmask32& non_finite) {
    const __mmask16 mask[2] = {static_cast<__mmask16>(columns),
                               static_cast<__mmask16>(columns >> 16)};
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    __m512 half[2];
    for (int h = 0; h < 2; ++h) {
      const __m512i x = _mm512_maskz_loadu_epi32(mask[h], row + 16 * h);
      const __mmask16 bad =
          _mm512_cmpeq_epi32_mask(_mm512_and_si512(x, exponent), exponent);
      non_finite |= bad;
      half[h] = _mm512_castsi512_ps(
          kFiniteOnly ? _mm512_maskz_mov_epi32(static_cast<__mmask16>(~bad), x)
                      : x);
    }
    SplitTerms<Tiles, kTerms, NearestBf16>(half[0], half[1], terms);
  }
};

// Interleaves the elements of two rows: pairs of columns 0-3, 8-11, 16-19 and
// 24-27, and the others.
HWY_INLINE void InterleaveLanes(__m512i even, __m512i odd, __m512i& low,
                                __m512i& high) {
  low = _mm512_unpacklo_epi16(even, odd);
  high = _mm512_unpackhi_epi16(even, odd);
}

// The same: pairs of columns 0-15 and 16-31.
HWY_INLINE void InterleaveRows(__m512i even, __m512i odd, __m512i& low,
                               __m512i& high) {
  __m512i a, b;
  InterleaveLanes(even, odd, a, b);
  low = _mm512_permutex2var_epi64(
      a, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), b);
  high = _mm512_permutex2var_epi64(
      a, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), b);
}

// Where a panel of 32 rows x 32 columns is written.
struct PackPlace {
  int64_t panel;   // of rows
  int64_t panels;  // of the block
  int64_t k;       // 32 columns
  int64_t depth_tiles;
  int64_t chunk_panels;  // kGradLeft, see ChunkPanels
};

// One term of a panel, its rows `stride` bytes apart, in the layout of a role.
template <int kTerms>
HWY_INLINE void WritePanel(Role role, const PackPlace& at, int term,
                           const uint8_t* rows, int64_t stride,
                           uint8_t* HWY_RESTRICT packed) {
  switch (role) {
    case Role::kScoreLeft:
    case Role::kScoreRight:
      for (int half = 0; half < 2; ++half) {
        const uint8_t* const from = rows + 16 * half * stride;
        uint8_t* const tile =
            packed +
            (((at.panel * kTerms + term) * 2 + half) * at.depth_tiles + at.k) *
                kTileBytes;
        __m512 v[16];
        if (role == Role::kScoreRight) {
          LoadColumns(from, stride, v);
        } else {
          for (int i = 0; i < 16; ++i)
            v[i] = _mm512_loadu_ps(from + i * stride);
        }
        for (int i = 0; i < 16; ++i) _mm512_store_ps(tile + 64 * i, v[i]);
      }
      return;
    case Role::kGradRight: {
      uint8_t* const tile =
          packed + ((term * at.depth_tiles + at.k) * 2 * at.panels + at.panel) *
                       kTileBytes;
      for (int i = 0; i < 16; ++i) {
        __m512i low, high;
        InterleaveRows(_mm512_loadu_si512(rows + 2 * i * stride),
                       _mm512_loadu_si512(rows + (2 * i + 1) * stride), low,
                       high);
        _mm512_store_si512(tile + 64 * i, low);
        _mm512_store_si512(tile + at.panels * kTileBytes + 64 * i, high);
      }
      return;
    }
    case Role::kGradLeft: {
      const int64_t chunk = at.panel / at.chunk_panels * at.chunk_panels;
      const int64_t in_chunk = std::min(at.chunk_panels, at.panels - chunk);
      uint8_t* const tile =
          packed +
          (chunk * at.depth_tiles * 2 * kTerms +
           (term * at.depth_tiles + at.k) * 2 * in_chunk + at.panel - chunk) *
              kTileBytes;
      alignas(64) uint8_t pairs[2][16 * 64];
      for (int i = 0; i < 16; ++i) {
        __m512i low, high;
        InterleaveLanes(_mm512_loadu_si512(rows + 2 * i * stride),
                        _mm512_loadu_si512(rows + (2 * i + 1) * stride), low,
                        high);
        _mm512_store_si512(pairs[0] + 64 * i, low);
        _mm512_store_si512(pairs[1] + 64 * i, high);
      }
      for (int odd = 0; odd < 2; ++odd) {
        __m512 v[16];
        LoadColumns(pairs[odd], 64, v);
        for (int i = 0; i < 16; ++i) {
          const int column = i / 4 * 8 + odd * 4 + i % 4;
          _mm512_store_ps(
              tile + column / 16 * in_chunk * kTileBytes + column % 16 * 64,
              v[i]);
        }
      }
      return;
    }
  }
}

// Prefetches the first line of 32 rows, `stride` bytes apart.
HWY_INLINE void FetchRows(const uint8_t* rows, int64_t stride) {
  for (int64_t r = 0; r < 32; ++r) _mm_prefetch(rows + r * stride, _MM_HINT_T0);
}

// A role and where its packing goes.
struct PackTarget {
  Role role;
  uint8_t* packed;
};

template <class Tiles, int kTerms, bool kFiniteOnly, int kTargets, class T>
bool PackRows(const PackTarget (&targets)[kTargets], const Rows& rows,
              int64_t padded_rows) {
  const T* data = static_cast<const T*>(rows.data);
  PackPlace at;
  at.panels = amx::Panels(padded_rows);
  at.depth_tiles = amx::DepthTiles(rows.depth);
  at.chunk_panels = amx::ChunkPanels(rows.depth);
  const bool plain = sizeof(T) == 2 && kTerms == 1 && !kFiniteOnly &&
                     rows.dtype == DType::kBF16;
  __mmask32 non_finite = 0;
  __m512i largest = _mm512_setzero_si512();  // of bf16 magnitudes
  for (at.panel = 0; at.panel < at.panels; ++at.panel) {
    const int64_t first = 32 * at.panel;
    for (at.k = 0; at.k < at.depth_tiles; ++at.k) {
      const T* const corner = data + first * rows.stride + 32 * at.k;
      if (plain && rows.depth - 32 * at.k >= 32 && rows.rows - first >= 32) {
        const uint8_t* const panel = reinterpret_cast<const uint8_t*>(corner);
        const int64_t stride = 2 * rows.stride;
        // The next panel, which packing would wait for (N 1024: backward D 64
        // and forward D 128 1 to 2%, backward D 128 and 256 0).
        if (rows.rows - first >= 64) FetchRows(panel + 32 * stride, stride);
        for (int64_t r = 0; r < 32; ++r) {
          largest = _mm512_max_epu16(
              largest, _mm512_and_si512(_mm512_loadu_si512(panel + r * stride),
                                        _mm512_set1_epi16(0x7fff)));
        }
        for (const PackTarget& target : targets) {
          WritePanel<kTerms>(target.role, at, 0, panel, stride, target.packed);
        }
        continue;
      }
      alignas(64) uint8_t x[kTerms][32 * 64];
      const __mmask32 columns = ColumnMask(rows.depth, 32 * at.k);
      for (int64_t r = 0; r < 32; ++r) {
        __m512i terms[kTerms];
        if (first + r < rows.rows) {
          RowReader<Tiles, kTerms, kFiniteOnly>::Read(
              corner + r * rows.stride, rows.dtype, columns, terms, non_finite);
        } else {
          for (int t = 0; t < kTerms; ++t) terms[t] = _mm512_setzero_si512();
        }
        for (int t = 0; t < kTerms; ++t) {
          _mm512_store_si512(x[t] + 64 * r, terms[t]);
        }
      }
      for (int t = 0; t < kTerms; ++t) {
        for (const PackTarget& target : targets) {
          WritePanel<kTerms>(target.role, at, t, x[t], 64, target.packed);
        }
      }
    }
  }
  // All exponent bits set.
  non_finite |= _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80));
  return non_finite == 0;
}

template <class Tiles, int kTerms>
bool Pack(Role role, const Rows& rows, int64_t padded_rows, bool finite_only,
          void* packed) {
  const PackTarget targets[] = {{role, static_cast<uint8_t*>(packed)}};
  if (rows.dtype == DType::kF32) {
    return finite_only ? PackRows<Tiles, kTerms, true, 1, float>(targets, rows,
                                                                 padded_rows)
                       : PackRows<Tiles, kTerms, false, 1, float>(targets, rows,
                                                                  padded_rows);
  }
  return finite_only ? PackRows<Tiles, kTerms, true, 1, uint16_t>(targets, rows,
                                                                  padded_rows)
                     : PackRows<Tiles, kTerms, false, 1, uint16_t>(
                           targets, rows, padded_rows);
}

template <class Tiles, int kTerms>
bool PackPair(Role score, Role grad, const Rows& rows, int64_t padded_rows,
              void* packed_score, void* packed_grad) {
  const PackTarget targets[] = {{score, static_cast<uint8_t*>(packed_score)},
                                {grad, static_cast<uint8_t*>(packed_grad)}};
  return rows.dtype == DType::kF32
             ? PackRows<Tiles, kTerms, false, 2, float>(targets, rows,
                                                        padded_rows)
             : PackRows<Tiles, kTerms, false, 2, uint16_t>(targets, rows,
                                                           padded_rows);
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_PACK_INL_H_
