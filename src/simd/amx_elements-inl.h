// Scores of 16 elements with every option, for the passes of the AMX engines
// that are not the fast path.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_ELEMENTS_INL_H_
#define FA2_SRC_SIMD_AMX_ELEMENTS_INL_H_

#include <cmath>

#include "src/simd/amx_math-inl.h"
#include "src/simd/amx_pack-inl.h"
#include "src/simd/engine.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Row `key` of the block is visible to 16 queries.
HWY_INLINE __mmask16 VisibleQueries(const float* begin, const float* end,
                                    int64_t key) {
  const __m512 k = _mm512_set1_ps(static_cast<float>(key));
  return _mm512_mask_cmp_ps_mask(
      _mm512_cmp_ps_mask(_mm512_loadu_ps(begin), k, _CMP_LE_OQ), k,
      _mm512_loadu_ps(end), _CMP_LT_OQ);
}

struct ScoreElements {
  __m512 s;         // after scale, softcap, bias and ALiBi
  __m512 slope;     // d (S after softcap) / d (S before)
  __m512 distance;  // of ALiBi
  __mmask16 visible;
};

// Offset of 16 queries of a row in a staged array [query panel][key][32].
HWY_INLINE int64_t StagedOffset(const ScoreOptions& o, int64_t key,
                                int64_t query) {
  return (query / 32 * o.staged_key_rows + key) * 32 + query % 32;
}

HWY_INLINE ScoreElements GeneralScore(const ScoreOptions& o, __m512 product,
                                      __mmask16 visible, int64_t key,
                                      int64_t query) {
  const __m512 one = _mm512_set1_ps(1.0f);
  ScoreElements e;
  e.visible = visible;
  e.slope = one;
  e.distance = _mm512_setzero_ps();
  e.s = _mm512_mul_ps(product, _mm512_set1_ps(static_cast<float>(o.scale)));
  if (o.softcap != 0.0) {
    const __m512 t = Tanh(
        _mm512_mul_ps(e.s, _mm512_set1_ps(static_cast<float>(1 / o.softcap))));
    e.slope = _mm512_fnmadd_ps(t, t, one);
    e.s = _mm512_mul_ps(t, _mm512_set1_ps(static_cast<float>(o.softcap)));
  }
  if (o.bias != nullptr) {
    const __m512 bias = _mm512_loadu_ps(static_cast<const float*>(o.bias) +
                                        StagedOffset(o, key, query));
    e.visible = _mm512_mask_cmp_ps_mask(
        e.visible, bias, _mm512_set1_ps(-HUGE_VALF), _CMP_NEQ_UQ);
    e.s = _mm512_add_ps(e.s, bias);
  }
  if (o.query_position != nullptr) {
    e.distance = _mm512_abs_ps(_mm512_sub_ps(
        _mm512_loadu_ps(static_cast<const float*>(o.query_position) + query),
        _mm512_set1_ps(static_cast<float>(key))));
    e.s = _mm512_fnmadd_ps(
        e.distance, _mm512_set1_ps(static_cast<float>(o.alibi_slope)), e.s);
  }
  return e;
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_ELEMENTS_INL_H_
