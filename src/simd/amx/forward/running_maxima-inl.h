// The online softmax of the forward pass on AMX: running maxima of 32 queries,
// and the factors by which what has been summed so far follows them.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_RUNNING_MAXIMA_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_RUNNING_MAXIMA_INL_H_

#include <cmath>

#include "src/simd/amx/math-inl.h"
#include "src/simd/amx/tile-inl.h"
#include "src/simd/engine.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Whether all of 32 queries have seen something.
HWY_INLINE bool HaveMaxima(const float* m) {
  const __m512 nothing = _mm512_set1_ps(-HUGE_VALF);
  return (_mm512_cmp_ps_mask(_mm512_loadu_ps(m), nothing, _CMP_EQ_OQ) |
          _mm512_cmp_ps_mask(_mm512_loadu_ps(m + 16), nothing, _CMP_EQ_OQ)) ==
         0;
}

// Whether a strip's sums of P for 32 queries show that the maxima of the strips
// before served for it too.
HWY_INLINE bool SumsAreLow(const float* sum) {
  const __m512 most = _mm512_set1_ps(kMostOfServing);
  return (_mm512_cmp_ps_mask(_mm512_loadu_ps(sum), most, _CMP_NLE_UQ) |
          _mm512_cmp_ps_mask(_mm512_loadu_ps(sum + 16), most, _CMP_NLE_UQ)) ==
         0;
}

// Moves the maxima `m` of 32 queries on to `seen` times `scale` and `ahead`
// more, and the sums `l` with them. Unless set ahead, a maximum stays where it
// is until it would rise by 5.5 (P <= 2^8): any reference serves as well, and
// the accumulator is seldom scaled. Writes the maxima times log2(e), 0 for
// queries that have seen nothing, and `origin` more to `max`. Returns whether
// the accumulator is to be multiplied by `alpha`.
HWY_INLINE bool RaiseMaxima(const float* seen, float scale, float ahead,
                            float origin, float* HWY_RESTRICT m,
                            float* HWY_RESTRICT l, float* HWY_RESTRICT max,
                            __m512 (&alpha)[2]) {
  bool scaled = false;
  const __m512 least_rise = _mm512_set1_ps(ahead > 0.0f ? 0.0f : 5.5f);
  for (int h = 0; h < 2; ++h) {
    const __m512 old = _mm512_loadu_ps(m + 16 * h);
    const __m512 scores =
        _mm512_fmadd_ps(_mm512_load_ps(seen + 16 * h), _mm512_set1_ps(scale),
                        _mm512_set1_ps(ahead));
    const __mmask16 raise =
        _mm512_cmp_ps_mask(scores, _mm512_add_ps(old, least_rise), _CMP_GT_OQ);
    const __m512 now = _mm512_mask_mov_ps(old, raise, scores);
    alpha[h] = _mm512_set1_ps(1.0f);
    if (raise != 0) {
      alpha[h] = _mm512_mask_mov_ps(
          alpha[h], raise,
          Exp2(_mm512_mul_ps(_mm512_sub_ps(old, now),
                             _mm512_set1_ps(kLog2E<float>))));
      _mm512_storeu_ps(l + 16 * h,
                       _mm512_mul_ps(_mm512_loadu_ps(l + 16 * h), alpha[h]));
      _mm512_storeu_ps(m + 16 * h, now);
      scaled = true;
    }
    // Queries that have seen nothing: exp2(-inf - 0) = 0.
    const __mmask16 seen_any =
        _mm512_cmp_ps_mask(now, _mm512_set1_ps(-HUGE_VALF), _CMP_NEQ_UQ);
    _mm512_storeu_ps(
        max + 16 * h,
        _mm512_add_ps(
            _mm512_maskz_mul_ps(seen_any, now, _mm512_set1_ps(kLog2E<float>)),
            _mm512_set1_ps(origin)));
  }
  return scaled;
}

// Multiplies the accumulator of 32 queries, `tiles` of 1 KiB, by alpha.
template <class Tiles>
HWY_INLINE void ScaleQueries(uint8_t* out, int64_t tiles,
                             const __m512 (&alpha)[2]) {
  // QueryOfLane.
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18,
                                          19, 24, 25, 26, 27);
  const __m512 by_half[2] = {
      _mm512_permutex2var_ps(alpha[0], lanes, alpha[1]),
      _mm512_permutex2var_ps(
          alpha[0], _mm512_add_epi32(lanes, _mm512_set1_epi32(4)), alpha[1])};
  for (int64_t tile = 0; tile < tiles; ++tile) {
    float* t = reinterpret_cast<float*>(out + tile * kTileBytes);
    for (int row = 0; row < 16; ++row) {
      _mm512_store_ps(t + 16 * row, _mm512_mul_ps(_mm512_load_ps(t + 16 * row),
                                                  by_half[tile % 2]));
    }
  }
  Tiles::Fence();
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_RUNNING_MAXIMA_INL_H_
