// SPDX-License-Identifier: Apache-2.0

// 64 bytes as the AMX kernels see them: Highway's vectors of 16 floats, 16
// words or 32 bf16, which are the rows of a tile; and the few instructions on
// them that Highway 1.0.3 has no name for, each as one function. The other
// files hold no intrinsics on vectors.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_VECTOR_INL_H_
#define FA2_SRC_SIMD_AMX_VECTOR_INL_H_

#include <immintrin.h>

#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::FixedTag<float, 16>;
using WordTag = hn::FixedTag<uint32_t, 16>;
using Bf16Tag = hn::FixedTag<uint16_t, 32>;
using Floats = hn::Vec<FloatTag>;
using Words = hn::Vec<WordTag>;
using Bf16s = hn::Vec<Bf16Tag>;
using FloatMask = hn::Mask<FloatTag>;
using Bf16Mask = hn::Mask<Bf16Tag>;

// A row of a tile, at a multiple of 64 bytes.
HWY_INLINE Floats LoadRow(const void* row) {
  return hn::Load(FloatTag(), static_cast<const float*>(row));
}
HWY_INLINE void StoreRow(Floats x, void* row) {
  hn::Store(x, FloatTag(), static_cast<float*>(row));
}
HWY_INLINE void StoreRow(Bf16s x, void* row) {
  hn::Store(x, Bf16Tag(), static_cast<uint16_t*>(row));
}

// Masks are kept in memory as bits; the first element's is the lowest.
HWY_INLINE FloatMask FloatMaskOf(uint16_t bits) { return FloatMask{bits}; }
HWY_INLINE Bf16Mask Bf16MaskOf(uint32_t bits) { return Bf16Mask{bits}; }
HWY_INLINE uint16_t BitsOf(FloatMask mask) {
  return static_cast<uint16_t>(mask.raw);
}
HWY_INLINE uint16_t BitsOf(hn::Mask<WordTag> mask) {
  return static_cast<uint16_t>(mask.raw);
}
HWY_INLINE uint32_t BitsOf(Bf16Mask mask) {
  return static_cast<uint32_t>(mask.raw);
}

// Where `mask` is set and a is not b, as NaN is nothing else.
HWY_INLINE FloatMask AndDiffer(FloatMask mask, Floats a, Floats b) {
  return FloatMask{
      _mm512_mask_cmp_ps_mask(mask.raw, a.raw, b.raw, _CMP_NEQ_UQ)};
}

// x - floor(x), and x less the nearest integer; of an infinite x 0, where a
// difference would be NaN.
HWY_INLINE Floats LessFloor(Floats x) {
  return Floats{_mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEG_INF | 8)};
}
HWY_INLINE Floats LessNearest(Floats x) {
  return Floats{_mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEAREST_INT | 8)};
}

// x 2^floor(exponent), right for subnormal and infinite results and any
// exponent; 0 outside `mask`.
HWY_INLINE Floats Scaled(Floats x, Floats exponent) {
  return Floats{_mm512_scalef_ps(x.raw, exponent.raw)};
}
HWY_INLINE Floats ScaledOrZero(FloatMask mask, Floats x, Floats exponent) {
  return Floats{_mm512_maskz_scalef_ps(mask.raw, x.raw, exponent.raw)};
}

// Elements of two vectors side by side, by the low five bits of an index.
HWY_INLINE Floats LookUp(Floats low, Floats high, Words index) {
  return Floats{_mm512_permutex2var_ps(low.raw, index.raw, high.raw)};
}

// Of 16 bytes each: the even blocks of a, then of b; the odd ones.
HWY_INLINE Floats EvenBlocks(Floats a, Floats b) {
  return Floats{_mm512_shuffle_f32x4(a.raw, b.raw, 0x88)};
}
HWY_INLINE Floats OddBlocks(Floats a, Floats b) {
  return Floats{_mm512_shuffle_f32x4(a.raw, b.raw, 0xdd)};
}
// The first two blocks of a and b by turns, and the last two.
HWY_INLINE Bf16s InterleaveLowerBlocks(Bf16s a, Bf16s b) {
  return Bf16s{_mm512_permutex2var_epi64(
      a.raw, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), b.raw)};
}
HWY_INLINE Bf16s InterleaveUpperBlocks(Bf16s a, Bf16s b) {
  return Bf16s{_mm512_permutex2var_epi64(
      a.raw, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), b.raw)};
}

// Element i of the result is element i / 2 of the first half of x where i is
// even, of the second where it is odd.
HWY_INLINE Bf16s InterleaveHalves(Bf16s x) {
  alignas(64) static constexpr uint16_t kIndex[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return Bf16s{
      _mm512_permutexvar_epi16(hn::Load(Bf16Tag(), kIndex).raw, x.raw)};
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_VECTOR_INL_H_
