// SPDX-License-Identifier: Apache-2.0

// Transposition, 32-bit lanes by blocks of 4 x 4, as many as a vector has.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_MATH_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_MATH_TRANSPOSE_INL_H_
#undef FA2_SRC_SIMD_MATH_TRANSPOSE_INL_H_
#else
#define FA2_SRC_SIMD_MATH_TRANSPOSE_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR

// Whole vectors where their length is known, else 128 bits.
#if HWY_HAVE_SCALABLE
using SquareTag = hn::FixedTag<float, 4>;
#else
using SquareTag = hn::ScalableTag<float>;
#endif

// Rows that are turned at once.
inline constexpr int64_t kSquare =
    static_cast<int64_t>(hn::MaxLanes(SquareTag()));

// Lanes [4 b, 4 b + 4) of the result hold in[4 b * stride] and the 3 after it.
template <class D>
HWY_INLINE hn::Vec<D> LoadColumnBlocks(D d, const float* HWY_RESTRICT in,
                                       int64_t stride) {
  if constexpr (hn::MaxLanes(d) == 4) {
    (void)stride;
    return hn::LoadU(d, in);
  } else {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
    // Masked broadcasts from memory need no shuffle unit.
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(in));
    v = _mm512_mask_broadcast_f32x4(v, 0x00F0, _mm_loadu_ps(in + 4 * stride));
    v = _mm512_mask_broadcast_f32x4(v, 0x0F00, _mm_loadu_ps(in + 8 * stride));
    v = _mm512_mask_broadcast_f32x4(v, 0xF000, _mm_loadu_ps(in + 12 * stride));
    return hn::Vec<D>{v};
#else
    static_assert(hn::MaxLanes(d) == 8);
    const hn::Half<D> half;
    return hn::Combine(d, hn::LoadU(half, in + 4 * stride),
                       hn::LoadU(half, in));
#endif
  }
}

// out[c * out_stride + r] = in[r * stride + c] for as many rows as lanes of D
// and a multiple of 4 columns. Blocks of 4 x 4 go to their places by how they
// are loaded. Not inlined: among others' registers compilers keep a pointer for
// each row and column in memory.
template <class D>
HWY_NOINLINE void TransposeStrip(D d, const float* HWY_RESTRICT in,
                                 int64_t stride, int64_t columns,
                                 float* HWY_RESTRICT out, int64_t out_stride) {
  const hn::Repartition<uint64_t, D> pairs;
  for (int64_t c = 0; c < columns; c += 4) {
    const auto row0 = LoadColumnBlocks(d, in + c, stride);
    const auto row1 = LoadColumnBlocks(d, in + stride + c, stride);
    const auto row2 = LoadColumnBlocks(d, in + 2 * stride + c, stride);
    const auto row3 = LoadColumnBlocks(d, in + 3 * stride + c, stride);
    const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, row0, row1));
    const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, row2, row3));
    const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, row0, row1));
    const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, row2, row3));
    float* to = out + c * out_stride;
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, to);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d,
               to + out_stride);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d,
               to + 2 * out_stride);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d,
               to + 3 * out_stride);
  }
}

#else
inline constexpr int64_t kSquare = 1;
#endif

// out[c * out_stride + r] = in[r * stride + c].
template <typename T>
HWY_INLINE void Transpose(const T* HWY_RESTRICT in, int64_t stride,
                          int64_t rows, int64_t columns, T* HWY_RESTRICT out,
                          int64_t out_stride) {
  int64_t whole_rows = 0, whole_columns = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 4) {
    whole_columns = columns / 4 * 4;
    const auto strips = [&](auto d, int64_t count) HWY_ATTR {
      for (; whole_rows + count <= rows; whole_rows += count) {
        TransposeStrip(d,
                       reinterpret_cast<const float*>(in + whole_rows * stride),
                       stride, whole_columns,
                       reinterpret_cast<float*>(out + whole_rows), out_stride);
      }
    };
    strips(SquareTag(), kSquare);
    strips(hn::FixedTag<float, 4>(), 4);
  }
#endif
  for (int64_t c = whole_rows == rows ? whole_columns : 0; c < columns; ++c) {
    for (int64_t r = c < whole_columns ? whole_rows : 0; r < rows; ++r) {
      out[c * out_stride + r] = in[r * stride + c];
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
