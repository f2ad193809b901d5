// SPDX-License-Identifier: Apache-2.0

// exp2 and tanh on 16 floats for the fused passes of the AMX engines.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_MATH_INL_H_
#define FA2_SRC_SIMD_AMX_MATH_INL_H_

#include "src/simd/amx/vector-inl.h"
#include "src/simd/math/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Results and operands below 2^-126 are 0 while an object of this class lives,
// as they are to the tile unit: a subnormal result costs vscalefps 150 cycles.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) {
    _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | kSubnormalsAreZero);
  }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  static constexpr unsigned kSubnormalsAreZero = 0x40;
  const unsigned before_;
};

// 2^x = mantissa * 2^exponent, the exponent rounded down.
struct PowerOfTwo {
  Floats mantissa;
  Floats exponent;
};

// Of RoughExp2.
template <int kDegree>
HWY_INLINE PowerOfTwo RoughExp2Parts(Floats x) {
  return {RoughExp2Fraction<kDegree, Held>(FloatTag(), LessFloor(x)), x};
}

// Of 2^x; a minimax polynomial of degree 6 on [-1/2, 1/2] errs by 2e-9.
HWY_INLINE PowerOfTwo Exp2Parts(Floats x) {
  const FloatTag d;
  const Floats n = hn::Round(x);
  const Floats f = LessNearest(x);
  Floats p = hn::Set(d, 1.5403530e-4f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.3333558e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.6181291e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.5504109e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.4022651e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.9314718e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  return {p, n};
}

// 2^x for any x: infinite above 2^128, NaN for NaN, and in the life of a
// FlushSubnormals 0 below 2^-126.
HWY_INLINE Floats Exp2(Floats x) {
  const PowerOfTwo parts = Exp2Parts(x);
  return Scaled(parts.mantissa, parts.exponent);
}

// 2^(x + ExpOrigin<Variant>()) where `visible`, else 0: P to the variant's
// precision.
template <class Variant>
HWY_INLINE PowerOfTwo ProbabilityExp2Parts(Floats x) {
  if constexpr (Variant::kExpDegree == 0) {
    return Exp2Parts(x);
  } else {
    return RoughExp2Parts<Variant::kExpDegree>(x);
  }
}
template <class Variant>
HWY_INLINE Floats ProbabilityExp2(Floats x) {
  const PowerOfTwo parts = ProbabilityExp2Parts<Variant>(x);
  return Scaled(parts.mantissa, parts.exponent);
}
template <class Variant>
HWY_INLINE Floats ProbabilityExp2(Floats x, FloatMask visible) {
  const PowerOfTwo parts = ProbabilityExp2Parts<Variant>(x);
  return ScaledOrZero(visible, parts.mantissa, parts.exponent);
}

template <class Variant>
constexpr float ExpOrigin() {
  if constexpr (Variant::kExpDegree == 0)
    return 0.0f;
  else
    return RoughExp2Polynomial<Variant::kExpDegree>::kOrigin;
}

// tanh(x) with a relative error of a few 1e-7. Near 0, where 1 - 2 / (e^2x + 1)
// cancels, the polynomial of Cephes' tanhf.
HWY_INLINE Floats Tanh(Floats x) {
  const FloatTag d;
  const Floats z = hn::Mul(x, x);
  Floats small = hn::Set(d, -5.70498872745e-3f);
  small = hn::MulAdd(small, z, hn::Set(d, 2.06390887954e-2f));
  small = hn::MulAdd(small, z, hn::Set(d, -5.37397155531e-2f));
  small = hn::MulAdd(small, z, hn::Set(d, 1.33314422036e-1f));
  small = hn::MulAdd(small, z, hn::Set(d, -3.33332819422e-1f));
  small = hn::MulAdd(hn::Mul(small, z), x, x);
  const Floats e = Exp2(hn::Mul(x, hn::Set(d, 2.88539008f)));
  const Floats one = hn::Set(d, 1.0f);
  const Floats large = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
  const FloatMask near_zero = hn::Lt(hn::Abs(x), hn::Set(d, 0.625f));
  return hn::IfThenElse(near_zero, small, large);
}

// Cubics in a of tanh(a / 5) for |a - i| <= 1/2, i = 0 to 31, by Chebyshev
// interpolation (odd at 0); the last one's constant halves the error above 31:
// [power][i].
inline constexpr float kTanhSteps = 5.0f;
alignas(64) inline constexpr float kTanhCubics[4][32] = {
    {0.0f,           -0.000118650845f, -0.00371091813f, -0.0199419279f,
     -0.0507408008f, -0.0810939372f,   -0.0888359249f,  -0.0597813055f,
     0.0067499578f,  0.101656348f,     0.212319076f,    0.327132612f,
     0.437507868f,   0.538125038f,     0.626365006f,    0.701525509f,
     0.764111876f,   0.815295756f,     0.856542587f,    0.889376104f,
     0.915241241f,   0.935434163f,     0.951074839f,    0.963105023f,
     0.972300231f,   0.979288936f,     0.984573185f,    0.988549888f,
     0.991529584f,   0.993753254f,     0.995406568f,    0.996369123f},
    {0.199999675f,    0.200520694f,    0.207358629f,    0.226673171f,
     0.253196865f,    0.273708433f,    0.278192759f,    0.264949679f,
     0.238407195f,    0.204914361f,    0.169937f,       0.137089312f,
     0.108251788f,    0.0840651393f,   0.0644248948f,   0.048850026f,
     0.0367180593f,   0.0273982026f,   0.0203172918f,   0.0149856843f,
     0.0110012256f,   0.00804244634f,  0.00585738523f,  0.00425149314f,
     0.0030763119f,   0.00221962878f,  0.00159729982f,  0.00114665204f,
     0.000821276102f, 0.000586981303f, 0.000418692623f, 0.000324048102f},
    {0.0f,
     -0.000772298779f,
     -0.00517916819f,
     -0.0128907813f,
     -0.0205306262f,
     -0.0251598395f,
     -0.0260240398f,
     -0.0240103938f,
     -0.0204781517f,
     -0.0165359732f,
     -0.0128491549f,
     -0.00971544161f,
     -0.00720321201f,
     -0.0052646785f,
     -0.00380718755f,
     -0.0027311598f,
     -0.00194712379f,
     -0.00138136651f,
     -0.000976114941f,
     -0.000687492487f,
     -0.000482871605f,
     -0.000338345068f,
     -0.000236582186f,
     -0.000165120204f,
     -0.000115052557f,
     -8.00455891e-05f,
     -5.56134364e-05f,
     -3.85896456e-05f,
     -2.6745558e-05f,
     -1.85164681e-05f,
     -1.28062475e-05f,
     -9.69085795e-06f},
    {-0.00265603769f, -0.0022559124f,  -0.00129285129f, -0.000259733672f,
     0.000476236397f, 0.000825132709f, 0.000880553678f, 0.000778410584f,
     0.000621607469f, 0.000466851023f, 0.00033725414f,  0.000237563276f,
     0.000164588069f, 0.000112783942f, 7.67225938e-05f, 5.19377427e-05f,
     3.50452319e-05f, 2.3595494e-05f,  1.58633975e-05f, 1.0654654e-05f,
     7.15152282e-06f, 4.79807932e-06f, 3.21816879e-06f, 2.15806608e-06f,
     1.44698288e-06f, 9.70115934e-07f, 6.5036653e-07f,  4.35988937e-07f,
     2.92267941e-07f, 1.95920165e-07f, 1.31332413e-07f, 9.71488916e-08f},
};

HWY_INLINE Floats TanhCubic(int power, Words index) {
  return LookUp(LoadRow(kTanhCubics[power]), LoadRow(kTanhCubics[power] + 16),
                index);
}

// tanh(x / kTanhSteps) with an error of 4e-6, near 0 of 1.4e-5 of x: a score
// capped at 50 errs by 2e-4, and with it P, which is then rounded to bf16
// (2e-3). Table lookups are shuffles, which the tile unit does not hold up.
HWY_INLINE Floats TanhOfSteps(Floats x) {
  const FloatTag d;
  const WordTag words;
  // The second operand is returned when one is NaN.
  const Floats a = hn::Min(hn::Set(d, 31.0f), hn::Abs(x));
  // The sum's low bits are a, rounded; lookups read five of them.
  const Words index = hn::BitCast(words, hn::Add(a, hn::Set(d, 12582912.0f)));
  Floats t = TanhCubic(3, index);
  t = hn::MulAdd(t, a, TanhCubic(2, index));
  t = hn::MulAdd(t, a, TanhCubic(1, index));
  t = hn::MulAdd(t, a, TanhCubic(0, index));
  // t is not negative.
  return hn::OrAnd(t, hn::SignBit(d), x);
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_MATH_INL_H_
