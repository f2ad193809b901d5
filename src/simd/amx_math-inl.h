// exp2 and tanh on 16 floats for the fused passes of the AMX engines.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_MATH_INL_H_
#define FA2_SRC_SIMD_AMX_MATH_INL_H_

#include <immintrin.h>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// 2^x where `visible`, else 0, for any x: 0 below 2^-100, infinite above, NaN
// for NaN. Minimax polynomials of 2^f on [0, 1), relative error 2.6e-6 for
// degree 4 (P is rounded to bf16 anyway; degree 3, 7.5e-5, adds 0.07% to the
// error of out) and 1.5e-7 for 5, and on [-1/2, 1/2] 2e-9 for degree 6.
// vreduceps gives the fraction and vscalefps floors its exponent, so nothing
// else is needed.
template <int kDegree>
HWY_INLINE __m512 Exp2(__m512 x, __mmask16 visible = 0xFFFF);

// Where 2^x is worth computing: a subnormal result would cost vscalefps some
// 150 cycles. NaN is.
HWY_INLINE __mmask16 NotTiny(__m512 x, __mmask16 visible) {
  return _mm512_mask_cmp_ps_mask(visible, x, _mm512_set1_ps(-100.0f),
                                 _CMP_NLT_UQ);
}

template <>
HWY_INLINE __m512 Exp2<4>(__m512 x, __mmask16 visible) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | 8);
  __m512 p = _mm512_set1_ps(0.013534168f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.05201146f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24144275f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69300383f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0000026f));
  return _mm512_maskz_scalef_ps(NotTiny(x, visible), p, x);
}

template <>
HWY_INLINE __m512 Exp2<5>(__m512 x, __mmask16 visible) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | 8);
  __m512 p = _mm512_set1_ps(0.00187757669f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.00898933969f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0558263175f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240153611f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693153083f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99999994f));
  return _mm512_maskz_scalef_ps(NotTiny(x, visible), p, x);
}

template <>
HWY_INLINE __m512 Exp2<6>(__m512 x, __mmask16 visible) {
  const __m512 n =
      _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // Infinite x: inf - inf would be NaN.
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | 8);
  __m512 p = _mm512_set1_ps(1.5403530e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(NotTiny(x, visible), p, n);
}

// tanh(x) with a relative error of a few 1e-7. Near 0, where 1 - 2 / (e^2x + 1)
// cancels, the polynomial of Cephes' tanhf.
HWY_INLINE __m512 Tanh(__m512 x) {
  const __m512 z = _mm512_mul_ps(x, x);
  __m512 small = _mm512_set1_ps(-5.70498872745e-3f);
  small = _mm512_fmadd_ps(small, z, _mm512_set1_ps(2.06390887954e-2f));
  small = _mm512_fmadd_ps(small, z, _mm512_set1_ps(-5.37397155531e-2f));
  small = _mm512_fmadd_ps(small, z, _mm512_set1_ps(1.33314422036e-1f));
  small = _mm512_fmadd_ps(small, z, _mm512_set1_ps(-3.33332819422e-1f));
  small = _mm512_fmadd_ps(_mm512_mul_ps(small, z), x, x);
  const __m512 e = Exp2<6>(_mm512_mul_ps(x, _mm512_set1_ps(2.88539008f)));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 large = _mm512_sub_ps(
      one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
  const __mmask16 near_zero =
      _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0.625f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(large, near_zero, small);
}

// tanh(x) with an absolute error of 3e-7, near 0 too: a score capped at 50 errs
// by 1.5e-5, and with it P, which is then rounded to bf16 (2e-3).
HWY_INLINE __m512 TanhAbsolute(__m512 x) {
  // Beyond 10 tanh is 1, and 2^(20 log2(e)) + 1 has a reciprocal. The second
  // operand is returned when one is NaN.
  const __m512 e =
      Exp2<5>(_mm512_min_ps(_mm512_set1_ps(28.8539008f),
                            _mm512_mul_ps(x, _mm512_set1_ps(2.88539008f))));
  const __m512 d = _mm512_add_ps(e, _mm512_set1_ps(1.0f));
  // Twice the reciprocal by one step of Newton's method, 6e-5 -> 4e-9.
  const __m512 r = _mm512_rcp14_ps(d);
  const __m512 two = _mm512_set1_ps(2.0f);
  const __m512 twice =
      _mm512_mul_ps(_mm512_add_ps(r, r), _mm512_fnmadd_ps(d, r, two));
  return _mm512_sub_ps(_mm512_set1_ps(1.0f), twice);
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_MATH_INL_H_
