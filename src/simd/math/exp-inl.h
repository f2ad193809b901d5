// SPDX-License-Identifier: Apache-2.0

// exp2 and tanh on vectors, for attention scores.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_MATH_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_MATH_EXP_INL_H_
#undef FA2_SRC_SIMD_MATH_EXP_INL_H_
#else
#define FA2_SRC_SIMD_MATH_EXP_INL_H_
#endif

#include <cstdint>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Minimax polynomials of 2^f on [-1/2, 1/2], the leading coefficient first:
// relative error 1.9e-9 in f32 (below its rounding, 6e-8), 3.1e-18 in f64.
template <typename T>
struct Exp2Polynomial;
template <>
struct Exp2Polynomial<float> {
  static constexpr float kCoefficients[] = {0.00015345812158740182f,
                                            0.0013399931209474140f,
                                            0.0096184889565227916f,
                                            0.055503287769976638f,
                                            0.24022646890639572f,
                                            0.69314720573725267f,
                                            1.0f};
};
template <>
struct Exp2Polynomial<double> {
  static constexpr double kCoefficients[] = {
      4.4352809446103361611e-10, 7.0741056262456593708e-9,
      1.0178198033328527662e-7,  1.3215433089594629037e-6,
      1.52527334899608046e-5,    0.00015403530462514613026,
      0.0013333558146789950323,  0.0096181291075883350833,
      0.055504108664819921483,   0.24022650695910156205,
      0.69314718055994533046,    1.0};
};

template <class D, class V>
HWY_INLINE V Exp2Fraction(D d, V f) {
  constexpr auto& c = Exp2Polynomial<hn::TFromD<D>>::kCoefficients;
  V p = hn::Set(d, c[0]);
  p = hn::MulAdd(p, f, hn::Set(d, c[1]));
  p = hn::MulAdd(p, f, hn::Set(d, c[2]));
  p = hn::MulAdd(p, f, hn::Set(d, c[3]));
  p = hn::MulAdd(p, f, hn::Set(d, c[4]));
  p = hn::MulAdd(p, f, hn::Set(d, c[5]));
  p = hn::MulAdd(p, f, hn::Set(d, c[6]));
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    p = hn::MulAdd(p, f, hn::Set(d, c[7]));
    p = hn::MulAdd(p, f, hn::Set(d, c[8]));
    p = hn::MulAdd(p, f, hn::Set(d, c[9]));
    p = hn::MulAdd(p, f, hn::Set(d, c[10]));
    p = hn::MulAdd(p, f, hn::Set(d, c[11]));
  }
  return p;
}

// Added to a number of up to 22 (f32) or 51 (f64) bits it rounds it to a whole
// one, in two's complement in the low bits of the sum.
template <typename T>
inline constexpr T kRounder = sizeof(T) == 4 ? T(12582912)
                                             : T(6755399441055744);

// p * 2^n by way of p's bits, for `sum` = n + kRounder; NaN and n out of the
// exponent's range give whatever. A conversion of n would do for f32, but for
// f64 AVX2 and less have none (15 instructions).
template <class D, class V>
HWY_INLINE V AddToExponent(D d, V p, V sum) {
  const hn::RebindToSigned<D> di;
  const auto shifted =
      hn::ShiftLeft<hwy::MantissaBits<hn::TFromD<D>>()>(hn::BitCast(di, sum));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), shifted));
}

// p * 2^n for whole n; n out of the exponent's range gives whatever.
template <class D, class V>
HWY_INLINE V ScaleByPowerOfTwo(D d, V p, V n) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  // One instruction that is right for every n, denormals included.
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    if constexpr (hn::MaxLanes(d) == 16) {
      return V{_mm512_scalef_ps(p.raw, n.raw)};
    }
  } else {
    if constexpr (hn::MaxLanes(d) == 8) {
      return V{_mm512_scalef_pd(p.raw, n.raw)};
    }
  }
#endif
  const V sum = hn::Add(n, hn::Set(d, kRounder<hn::TFromD<D>>));
  return hn::IfThenElse(hn::Eq(p, p), AddToExponent(d, p, sum), p);
}

// 2^x. Below 2^-100 (2^-960) the result is exactly 0, so -inf gives 0, and no
// product with it is subnormal, which costs an x86 FMA some 150 cycles; above
// the largest exponent it is +inf. NaN stays NaN: comparisons with NaN are
// false, so no clamp can swallow it.
template <class D, class V>
HWY_INLINE V Exp2(D d, V x) {
  using T = hn::TFromD<D>;
  const V lowest = hn::Set(d, sizeof(T) == 4 ? T(-100) : T(-960));
  const V highest = hn::Set(d, sizeof(T) == 4 ? T(127.99999) : T(1023.99999));
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  const V n = hn::Round(x);
  // Held above the lowest: a subnormal result, though dropped below, would cost
  // vscalefps some 150 cycles.
  const V scaled =
      ScaleByPowerOfTwo(d, Exp2Fraction(d, hn::Sub(x, n)), hn::Max(n, lowest));
  const V low = hn::IfThenZeroElse(hn::Lt(x, lowest), scaled);
  return hn::IfThenElse(hn::Gt(x, highest), hn::Inf(d), low);
#else
  const V sum = hn::Add(x, hn::Set(d, kRounder<T>));
  const V n = hn::Sub(sum, hn::Set(d, kRounder<T>));
  const V scaled = AddToExponent(d, Exp2Fraction(d, hn::Sub(x, n)), sum);
  const V low = hn::IfThenZeroElse(hn::Lt(x, lowest), scaled);
  // Else +inf, or NaN.
  return hn::IfThenElse(hn::Le(x, highest), low, hn::Add(x, hn::Inf(d)));
#endif
}

template <typename T>
inline constexpr T kLog2E = T(1.44269504088896340735992468100189214);

// Whether ExpAbreast is worth it.
inline constexpr bool kExpsAbreast = HWY_TARGET == HWY_AVX2;

#if HWY_TARGET == HWY_AVX2
// x between the limits. Minimum and maximum take the second of their arguments
// if one is NaN.
HWY_INLINE __m256 Between(float lowest, float highest, __m256 x) {
  return _mm256_max_ps(_mm256_set1_ps(lowest),
                       _mm256_min_ps(_mm256_set1_ps(highest), x));
}
HWY_INLINE __m256d Between(double lowest, double highest, __m256d x) {
  return _mm256_max_pd(_mm256_set1_pd(lowest),
                       _mm256_min_pd(_mm256_set1_pd(highest), x));
}

// e^x of one vector or of four, an instruction of each before the next of any:
// the schedulers of such a CPU see some 64 instructions, fewer than it takes to
// keep busy with one vector after the other (Zen 3, f32: 7.3 cycles a vector
// instead of 10). What is not counted stays as it is.
template <size_t kCount, class D, class V>
HWY_INLINE void ExpAbreast(D d, V& x0, V& x1, V& x2, V& x3) {
  using T = hn::TFromD<D>;
  constexpr auto& kCoefficients = Exp2Polynomial<T>::kCoefficients;
  // kFactor times the polynomial times 2^n / kFactor: for the greatest n the
  // latter is no infinity yet, and for the least, -kLeast, its bits are those
  // of 0.
  constexpr int kFactorBits = sizeof(T) == 4 ? 26 : 62;
  constexpr T kFactor = T(uint64_t{1} << kFactorBits);
  constexpr int kGreatest = std::numeric_limits<T>::max_exponent;
  constexpr T kLeast = T(kGreatest - 1 - kFactorBits);
  constexpr T kLn2 = T(0.693147180559945309417232121458176568);
#define FA2_EACH(f) \
  f(0) if constexpr (kCount == 4) { f(1) f(2) f(3) }
  const V log2e = hn::Set(d, kLog2E<T>);
  V f0 = x0, f1 = x0, f2 = x0, f3 = x0;
  // The lowest rounds to -kLeast, which gives 0, the highest to infinity.
#define FA2_HOLD(i) \
  f##i.raw = Between(-kLeast * kLn2, (kGreatest + T(0.25)) * kLn2, x##i.raw);
  FA2_EACH(FA2_HOLD)
#undef FA2_HOLD
  // The low bits are the exponent's of 2^n / kFactor.
  const V magic = hn::Set(d, kRounder<T> + kLeast);
  V n0 = f0, n1 = f0, n2 = f0, n3 = f0;
#define FA2_ROUND(i) n##i = hn::MulAdd(f##i, log2e, magic);
  FA2_EACH(FA2_ROUND)
#undef FA2_ROUND
#define FA2_FRACTION(i) f##i = hn::MulSub(f##i, log2e, hn::Sub(n##i, magic));
  FA2_EACH(FA2_FRACTION)
#undef FA2_FRACTION
  V c = hn::Set(d, kCoefficients[0] * kFactor);
  V p0 = c, p1 = c, p2 = c, p3 = c;
#define FA2_ADD(i) p##i = hn::MulAdd(p##i, f##i, c);
#define FA2_TERM(power)                           \
  c = hn::Set(d, kCoefficients[power] * kFactor); \
  FA2_EACH(FA2_ADD)
  FA2_TERM(1)
  FA2_TERM(2)
  FA2_TERM(3)
  FA2_TERM(4)
  FA2_TERM(5)
  FA2_TERM(6)
  if constexpr (sizeof(T) == 8) {
    FA2_TERM(7)
    FA2_TERM(8)
    FA2_TERM(9)
    FA2_TERM(10)
    FA2_TERM(11)
  }
#undef FA2_TERM
#undef FA2_ADD
  const hn::RebindToSigned<D> di;
#define FA2_SCALE(i)                                                         \
  x##i = hn::Mul(p##i, hn::BitCast(d, hn::ShiftLeft<hwy::MantissaBits<T>()>( \
                                          hn::BitCast(di, n##i))));
  FA2_EACH(FA2_SCALE)
#undef FA2_SCALE
#undef FA2_EACH
}
#endif

// e^x, with Exp2's range and exceptions.
template <class D, class V>
HWY_INLINE V Exp(D d, V x) {
  using T = hn::TFromD<D>;
  const V log2e = hn::Set(d, kLog2E<T>);
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  if constexpr (sizeof(T) == 4 && hn::MaxLanes(d) == 16) {
    // 13 instructions instead of 18. Adding 1.5 * 2^23 rounds to a whole number
    // in the last place; the remainder of x log2(e) is rounded only once.
    // Lanes that vscalefps leaves out cost nothing, subnormal or not, and what
    // is above the range it makes +inf; a NaN is neither.
    const V held = V{_mm512_min_ps(_mm512_set1_ps(128.0f), x.raw)};
    const V magic = hn::Set(d, kRounder<T>);
    const V n = hn::Sub(hn::MulAdd(held, log2e, magic), magic);
    const V p = Exp2Fraction(d, hn::MulSub(held, log2e, n));
    // -100 ln 2.
    const __mmask16 kept =
        _mm512_cmp_ps_mask(held.raw, _mm512_set1_ps(-69.3147181f), _CMP_NLT_UQ);
    return V{_mm512_maskz_scalef_ps(kept, p.raw, n.raw)};
  }
#elif HWY_TARGET == HWY_AVX2
  ExpAbreast<1>(d, x, x, x, x);
  return x;
#endif
  return Exp2(d, hn::Mul(x, log2e));
}

// e^x for x <= 0 with a relative error of 1.2e-7 in f32 and 5e-16 in f64; below
// 2^-125.5 (2^-1020) the result is 0; NaN stays NaN. Exp takes 2^(x log2(e)),
// whose product is rounded or, fused, has a rounded factor: in f32 an error of
// 6e-8 or 1.3e-8 of |x|, which does for scores near their maximum, but not for
// a row of any range.
template <class D, class V>
HWY_INLINE V ExpNonPositive(D d, V x) {
  using T = hn::TFromD<D>;
  constexpr bool kF32 = sizeof(T) == 4;
  const hn::RebindToSigned<D> di;
  // In f32 the sum's low bits are n + 127, the exponent's of 2^n.
  const V magic = hn::Set(d, kRounder<T> + (kF32 ? T(127) : T(0)));
  const V log2e = hn::Set(d, kLog2E<T>);
  const V sum = hn::MulAdd(x, log2e, magic);
  const V n = hn::Sub(sum, magic);
  // x - n ln 2, with ln 2 in two parts, the first with so many zero bits at its
  // end that its product with n is exact.
  V r = hn::NegMulAdd(
      n, hn::Set(d, kF32 ? T(0.693145751953125) : T(0x1.62e42feep-1)), x);
  r = hn::NegMulAdd(
      n, hn::Set(d, kF32 ? T(1.428606765330187e-6) : T(0x1.a39ef35793c76p-33)),
      r);
  const V p = Exp2Fraction(d, hn::Mul(r, log2e));
  // Where the result is dropped n may be anything. Not "keep if greater": a NaN
  // must come through.
  const auto dropped = hn::Lt(x, hn::Set(d, kF32 ? T(-86.98997) : T(-707)));
  if constexpr (kF32) {
    // A product, not an addition to the exponent's bits: NaN stays NaN.
    // -125.5 ln 2: n is -125 or more, so the result is normal.
    const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, sum)));
    return hn::IfThenZeroElse(dropped, hn::Mul(p, power));
  } else {
    const V y = hn::IfThenZeroElse(dropped, AddToExponent(d, p, sum));
    return hn::IfThenElse(hn::Eq(x, x), y, x);
  }
}

#if HWY_TARGET != HWY_AVX2
// Elsewhere one vector after the other (AVX-512 on Zen 5 gains nothing by
// more).
template <size_t kCount, class D, class V>
HWY_INLINE void ExpAbreast(D d, V& x0, V& x1, V& x2, V& x3) {
  static_assert(kCount == 4, "");
  x0 = Exp(d, x0);
  x1 = Exp(d, x1);
  x2 = Exp(d, x2);
  x3 = Exp(d, x3);
}
#endif

// How an expression gets at its constants. Held: as the compiler likes, in
// registers where it can. Read: from memory, anew each time, where other values
// fill the registers; the compiler would still hold the constants, and store
// and load what matters.
struct Held {
  template <typename T>
  static HWY_INLINE const T* At(const T* constants) {
    return constants;
  }
};
struct Read {
  template <typename T>
  static HWY_INLINE const T* At(const T* constants) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
    asm volatile("" : "+r"(constants));
#endif
    return constants;
  }
};

// Minimax polynomials of 2^f on [0, 1) in f32 for what is then rounded to bf16,
// divided by their leading coefficient, which is 2^-kOrigin: so the first
// multiply-add is an addition, which beside products costs less, and what they
// were divided by is in the exponent. Relative error 7.5e-5 (mean 5e-6) for
// degree 3, 2.7e-6 for degree 4.
template <int kDegree>
struct RoughExp2Polynomial;
template <>
struct RoughExp2Polynomial<3> {
  static constexpr float kOrigin = 3.6799285f;
  static constexpr float kCoefficients[] = {2.8973858f, 8.918139f, 12.815525f};
};
template <>
struct RoughExp2Polynomial<4> {
  static constexpr float kOrigin = 6.20725f;
  static constexpr float kCoefficients[] = {3.8429744f, 17.839499f, 51.20402f,
                                            73.88726f};
};

template <int kDegree, class From, class D, class V>
HWY_INLINE V RoughExp2Fraction(D d, V f) {
  const float* const c = From::At(RoughExp2Polynomial<kDegree>::kCoefficients);
  V p = hn::Add(f, hn::Set(d, c[0]));
  p = hn::MulAdd(p, f, hn::Set(d, c[1]));
  p = hn::MulAdd(p, f, hn::Set(d, c[2]));
  if constexpr (kDegree == 4) p = hn::MulAdd(p, f, hn::Set(d, c[3]));
  return p;
}

// 2^(x + kOrigin), with Exp's exceptions; 0 below 2^-149 at the latest.
template <int kDegree, class From, class D, class V>
HWY_INLINE V RoughExp2(D d, V x) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  if constexpr (hn::MaxLanes(d) == 16) {
    // vscalefps floors its exponent. 4.4 cycles a vector of the backward's pass
    // on Zen 5, 5 where results are subnormal; by way of integers, as below,
    // 5.3 to 6.6, with a comparison that makes subnormal results 0, 4.6.
    const V f = V{_mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEG_INF | 8)};
    return V{
        _mm512_scalef_ps(RoughExp2Fraction<kDegree, From>(d, f).raw, x.raw)};
  }
#endif
  // Comparisons with NaN are false, so that NaN stays. What the polynomial errs
  // by must not make the exponent that of infinity and NaN.
  const V most =
      hn::Set(d, 128.0f - RoughExp2Polynomial<kDegree>::kOrigin - 0.001f);
  const auto above = hn::Gt(x, most);
  const V held = hn::IfThenElse(above, most, x);
  const V n = hn::Floor(held);
  const V scaled = ScaleByPowerOfTwo(
      d, RoughExp2Fraction<kDegree, From>(d, hn::Sub(held, n)), n);
  const V low = hn::IfThenZeroElse(hn::Lt(held, hn::Set(d, -100.0f)), scaled);
  return hn::IfThenElse(above, hn::Inf(d), low);
}

// tanh(x). Near 0 f32 takes an odd polynomial (relative error 4e-9), since
// 1 - 2 / (e^2x + 1) alone would lose the leading digits there; double keeps
// an absolute error of 1e-16, far below what a score in double needs.
template <class D, class V>
HWY_INLINE V Tanh(D d, V x) {
  using T = hn::TFromD<D>;
  const V one = hn::Set(d, T(1));
  const V e = Exp2(d, hn::Mul(x, hn::Set(d, T(2.8853900817779268147))));
  const V large = hn::Sub(one, hn::Div(hn::Set(d, T(2)), hn::Add(e, one)));
  if constexpr (sizeof(T) == 8) {
    return large;
  } else {
    const V z = hn::Mul(x, x);
    V p = hn::Set(d, T(-0.00565998894063));
    p = hn::MulAdd(p, z, hn::Set(d, T(0.0205909882716)));
    p = hn::MulAdd(p, z, hn::Set(d, T(-0.0537210680062)));
    p = hn::MulAdd(p, z, hn::Set(d, T(0.133311275363)));
    p = hn::MulAdd(p, z, hn::Set(d, T(-0.333332605269)));
    p = hn::MulAdd(p, z, hn::Set(d, T(0.999999996075)));
    return hn::IfThenElse(hn::Lt(z, hn::Set(d, T(0.390625))), hn::Mul(p, x),
                          large);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
