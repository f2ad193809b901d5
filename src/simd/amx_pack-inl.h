// Packing of operands into tiles, and unpacking of accumulators, for the AMX
// engines. Layouts: amx_layout.h.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_PACK_INL_H_
#define FA2_SRC_SIMD_AMX_PACK_INL_H_

#include "src/simd/amx_layout.h"
#include "src/simd/amx_tile-inl.h"

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

// The upper 16 bits of x, which is left with the rest. What is left of an
// infinite x is NaN.
HWY_INLINE __m512 TakeUpperBits(__m512& x) {
  const __m512 taken = _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(x),
                       _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  x = _mm512_sub_ps(x, taken);
  return taken;
}

// x to bf16, half up, which leaves half as much as cutting it off, of both
// signs. Nothing is left of a non-finite number, so that it keeps its own
// value.
HWY_INLINE __m512 TakeNearest(__m512& x) {
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

// 32 inputs as a sum of kTerms bf16 vectors, most significant first.
template <class Tiles, int kTerms>
HWY_INLINE void SplitTerms(__m512 low, __m512 high,
                           __m512i* HWY_RESTRICT terms) {
  for (int t = 0; t + 1 < kTerms; ++t) {
    const __m512 low_term = TakeNearest(low), high_term = TakeNearest(high);
    terms[t] = Tiles::RoundToBf16(low_term, high_term);
  }
  terms[kTerms - 1] = Tiles::RoundToBf16(low, high);
}

// The same of P and dS, in the fewest operations: the fused passes wait for
// them.
template <class Tiles, int kTerms>
HWY_INLINE void SplitScores(__m512 low, __m512 high,
                            __m512i* HWY_RESTRICT terms) {
  for (int t = 0; t + 1 < kTerms; ++t) {
    const __m512 low_term = TakeUpperBits(low), high_term = TakeUpperBits(high);
    terms[t] = Tiles::RoundToBf16(low_term, high_term);
  }
  terms[kTerms - 1] = Tiles::RoundToBf16(low, high);
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
      SplitTerms<Tiles, kTerms>(
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
    SplitTerms<Tiles, kTerms>(half[0], half[1], terms);
  }
};

// Interleaves the elements of two rows: pairs of columns 0-15 and 16-31.
HWY_INLINE void InterleaveRows(__m512i even, __m512i odd, __m512i& low,
                               __m512i& high) {
  const __m512i low_index = _mm512_add_epi16(
      _mm512_and_si512(_mm512_set1_epi32(static_cast<int>(0xffff0000u)),
                       _mm512_set1_epi16(32)),
      _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                                           12, 13, 14, 15),
                         _mm512_set1_epi32(0x10001)));
  const __m512i high_index = _mm512_add_epi16(low_index, _mm512_set1_epi16(16));
  low = _mm512_permutex2var_epi16(even, low_index, odd);
  high = _mm512_permutex2var_epi16(even, high_index, odd);
}

template <class Tiles, int kTerms, bool kFiniteOnly, class T>
bool PackRows(Role role, const Rows& rows, int64_t padded_rows,
              uint8_t* HWY_RESTRICT packed) {
  const T* data = static_cast<const T*>(rows.data);
  const int64_t depth_tiles = amx::DepthTiles(rows.depth);
  const int64_t panels = amx::Panels(padded_rows);
  __mmask32 non_finite = 0;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t chunk_panels = amx::ChunkPanels(rows.depth);
    const int64_t chunk = panel / chunk_panels * chunk_panels;
    const int64_t in_chunk = std::min(chunk_panels, panels - chunk);
    for (int64_t k = 0; k < depth_tiles; ++k) {
      const int64_t left = rows.depth - 32 * k;
      const __mmask32 columns =
          left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      __m512i x[kTerms][32];
      for (int64_t r = 0; r < 32; ++r) {
        const int64_t row = 32 * panel + r;
        __m512i terms[kTerms];
        if (row < rows.rows) {
          RowReader<Tiles, kTerms, kFiniteOnly>::Read(
              data + row * rows.stride + 32 * k, rows.dtype, columns, terms,
              non_finite);
        } else {
          for (int t = 0; t < kTerms; ++t) terms[t] = _mm512_setzero_si512();
        }
        for (int t = 0; t < kTerms; ++t) x[t][r] = terms[t];
      }
      for (int t = 0; t < kTerms; ++t) {
        if (role == Role::kScoreLeft || role == Role::kScoreRight) {
          for (int half = 0; half < 2; ++half) {
            __m512i* HWY_RESTRICT v = x[t] + 16 * half;
            if (role == Role::kScoreRight) Transpose16x16(v);
            uint8_t* tile =
                packed + (((panel * kTerms + t) * 2 + half) * depth_tiles + k) *
                             kTileBytes;
            for (int i = 0; i < 16; ++i) {
              _mm512_store_si512(tile + 64 * i, v[i]);
            }
          }
        } else {
          __m512i low[16], high[16];
          for (int i = 0; i < 16; ++i) {
            InterleaveRows(x[t][2 * i], x[t][2 * i + 1], low[i], high[i]);
          }
          int64_t tile, step;
          if (role == Role::kGradRight) {
            tile = (t * depth_tiles + k) * 2 * panels + panel;
            step = panels;
          } else {
            Transpose16x16(low);
            Transpose16x16(high);
            tile = chunk * depth_tiles * 2 * kTerms +
                   (t * depth_tiles + k) * 2 * in_chunk + panel - chunk;
            step = in_chunk;
          }
          for (int i = 0; i < 16; ++i) {
            _mm512_store_si512(packed + tile * kTileBytes + 64 * i, low[i]);
            _mm512_store_si512(packed + (tile + step) * kTileBytes + 64 * i,
                               high[i]);
          }
        }
      }
    }
  }
  return non_finite == 0;
}

template <class Tiles, int kTerms>
bool Pack(Role role, const Rows& rows, int64_t padded_rows, bool finite_only,
          void* packed) {
  uint8_t* out = static_cast<uint8_t*>(packed);
  if (rows.dtype == DType::kF32) {
    return finite_only ? PackRows<Tiles, kTerms, true, float>(role, rows,
                                                              padded_rows, out)
                       : PackRows<Tiles, kTerms, false, float>(
                             role, rows, padded_rows, out);
  }
  return finite_only ? PackRows<Tiles, kTerms, true, uint16_t>(role, rows,
                                                               padded_rows, out)
                     : PackRows<Tiles, kTerms, false, uint16_t>(
                           role, rows, padded_rows, out);
}

inline void UnpackKeyRows(const void* accumulator, int64_t /*keys*/,
                          int64_t depth, int64_t first, int64_t count,
                          void* rows, int64_t row_stride) {
  const int64_t columns = 2 * amx::DepthTiles(depth);
  const uint8_t* tiles = static_cast<const uint8_t*>(accumulator);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = first + r;
    float* out = static_cast<float*>(rows) + r * row_stride;
    for (int64_t d = 0; 16 * d < depth; ++d) {
      const __m512 x = _mm512_load_ps(
          tiles + ((row / 16) * columns + d) * kTileBytes + row % 16 * 64);
      const int64_t left = depth - 16 * d;
      if (left >= 16) {
        _mm512_storeu_ps(out + 16 * d, x);
      } else {
        _mm512_mask_storeu_ps(out + 16 * d,
                              static_cast<__mmask16>((1 << left) - 1), x);
      }
    }
  }
}

inline void UnpackQueryRows(const void* accumulator, int64_t /*queries*/,
                            int64_t depth, int64_t first, int64_t count,
                            void* rows, int64_t row_stride) {
  const int64_t columns = 2 * amx::DepthTiles(depth);
  const uint8_t* tiles = static_cast<const uint8_t*>(accumulator);
  for (int64_t panel = first / 32; 32 * panel < first + count; ++panel) {
    for (int64_t d = 0; 16 * d < depth; ++d) {
      const int64_t left = depth - 16 * d;
      const __mmask16 mask = left >= 16
                                 ? static_cast<__mmask16>(0xffff)
                                 : static_cast<__mmask16>((1 << left) - 1);
      for (int64_t half = 0; half < 2; ++half) {
        const uint8_t* tile =
            tiles + ((panel * columns + d) * 2 + half) * kTileBytes;
        __m512i v[16];
        for (int i = 0; i < 16; ++i) v[i] = _mm512_load_si512(tile + 64 * i);
        Transpose16x16(v);
        for (int i = 0; i < 16; ++i) {
          const int64_t r = 32 * panel + amx::QueryOfLane(half, i) - first;
          if (r < 0 || r >= count) continue;
          _mm512_mask_storeu_epi32(
              static_cast<float*>(rows) + r * row_stride + 16 * d, mask, v[i]);
        }
      }
    }
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_PACK_INL_H_
