// SPDX-License-Identifier: Apache-2.0

// exp2 and its like on every target against double, and where they must be
// exactly zero, infinite or NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/simd/exp_test.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/highway.h"
#include "src/simd/math/exp-inl.h"
#include "src/simd/target.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

// The arrays have room for a whole vector past `count`.
template <typename T>
void TakeExp(const T* from, size_t count, T* to) {
  const hn::ScalableTag<T> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    hn::StoreU(Exp(d, hn::LoadU(d, from + i)), d, to + i);
  }
}
void TakeExpF32(const float* from, size_t count, float* to) {
  TakeExp(from, count, to);
}
void TakeExpF64(const double* from, size_t count, double* to) {
  TakeExp(from, count, to);
}
// Four vectors at a time; room for that past `count`.
template <typename T>
void TakeExpAbreast(const T* from, size_t count, T* to) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < count; i += 4 * lanes) {
    auto x0 = hn::LoadU(d, from + i);
    auto x1 = hn::LoadU(d, from + i + lanes);
    auto x2 = hn::LoadU(d, from + i + 2 * lanes);
    auto x3 = hn::LoadU(d, from + i + 3 * lanes);
    ExpAbreast<4>(d, x0, x1, x2, x3);
    hn::StoreU(x0, d, to + i);
    hn::StoreU(x1, d, to + i + lanes);
    hn::StoreU(x2, d, to + i + 2 * lanes);
    hn::StoreU(x3, d, to + i + 3 * lanes);
  }
}
void TakeExpAbreastF32(const float* from, size_t count, float* to) {
  TakeExpAbreast(from, count, to);
}
void TakeExpAbreastF64(const double* from, size_t count, double* to) {
  TakeExpAbreast(from, count, to);
}
void TakeExpNonPositive(const float* from, size_t count, float* to) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    hn::StoreU(ExpNonPositive(d, hn::LoadU(d, from + i)), d, to + i);
  }
}
template <int kDegree, class From>
void TakeRoughExp2(const float* from, size_t count, float* to) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    hn::StoreU(RoughExp2<kDegree, From>(d, hn::LoadU(d, from + i)), d, to + i);
  }
}
void TakeRoughExp2Degree3(const float* from, size_t count, float* to) {
  TakeRoughExp2<3, Held>(from, count, to);
}
void TakeRoughExp2Degree4(const float* from, size_t count, float* to) {
  TakeRoughExp2<4, Read>(from, count, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fa2::simd {

HWY_EXPORT(TakeExpF32);
HWY_EXPORT(TakeExpF64);
HWY_EXPORT(TakeExpAbreastF32);
HWY_EXPORT(TakeExpAbreastF64);
HWY_EXPORT(TakeExpNonPositive);
HWY_EXPORT(TakeRoughExp2Degree3);
HWY_EXPORT(TakeRoughExp2Degree4);

namespace {

template <typename T>
using Function = void (*)(const T*, size_t, T*);

// No four vectors of any target have more floats (SVE: 2,048 bits).
constexpr size_t kPadding = 4 * 64;

template <typename T>
std::vector<T> Take(Function<T> f, std::vector<T> x) {
  const size_t count = x.size();
  x.resize(count + kPadding);
  std::vector<T> y(x.size());
  f(x.data(), count, y.data());
  y.resize(count);
  return y;
}

template <typename T>
std::vector<T> Range(T first, T last, T step) {
  std::vector<T> x;
  for (T at = first; at <= last; at += step) x.push_back(at);
  return x;
}

// Relative to base^x * 2^origin.
template <typename T>
double LargestError(Function<T> f, const std::vector<T>& x, long double base,
                    long double origin) {
  const std::vector<T> y = Take(f, x);
  const long double log2_base = std::log2(base);
  double largest = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const long double exact = std::exp2(x[i] * log2_base + origin);
    const double error = static_cast<double>(std::abs(y[i] / exact - 1.0L));
    largest = std::max(largest, std::isnan(error) ? HUGE_VAL : error);
  }
  return largest;
}

// Beyond what T holds, in the unit of the argument: +inf above, exactly 0
// below, NaN for NaN.
template <typename T>
void ExpectExtremes(Function<T> f, T above, T below) {
  constexpr T kMost = std::numeric_limits<T>::max();
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const std::vector<T> y =
      Take(f, {above, kMost, kInfinity, below, -kMost, -kInfinity,
               std::numeric_limits<T>::quiet_NaN()});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(y[i], kInfinity) << i;
  for (int i = 3; i < 6; ++i) EXPECT_EQ(y[i], T(0)) << i;
  EXPECT_TRUE(std::isnan(y[6]));
}

constexpr long double kE = 2.718281828459045235360287471352662498L;

TEST(Exp, OnEveryTarget) {
  for (int64_t rest = AvailableTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    SCOPED_TRACE(BestTargetName(target));
    // The argument's product with log2(e), rounded: ln(2) 2^-24 (2^-53) of 29,
    // 127 and, in f64, 1023.
    for (const auto f : {FA2_TARGET_FUNCTION(TakeExpF32, target),
                         FA2_TARGET_FUNCTION(TakeExpAbreastF32, target)}) {
      EXPECT_LE(LargestError(f, Range(-20.0f, 20.0f, 0.00137f), kE, 0.0L),
                1.5e-6);
      EXPECT_LE(LargestError(f, Range(-69.0f, 88.7f, 0.00931f), kE, 0.0L),
                8e-6);
      ExpectExtremes(f, 89.0f, -71.0f);
    }
    for (const auto f : {FA2_TARGET_FUNCTION(TakeExpF64, target),
                         FA2_TARGET_FUNCTION(TakeExpAbreastF64, target)}) {
      EXPECT_LE(LargestError(f, Range(-20.0, 20.0, 0.00137), kE, 0.0L), 3e-15);
      EXPECT_LE(LargestError(f, Range(-665.0, 709.7, 0.0193), kE, 0.0L), 1e-13);
      ExpectExtremes(f, 709.79, -667.0);
    }
  }
}

TEST(ExpNonPositive, OnEveryTarget) {
  for (int64_t rest = AvailableTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    SCOPED_TRACE(BestTargetName(target));
    const auto f = FA2_TARGET_FUNCTION(TakeExpNonPositive, target);
    EXPECT_LE(LargestError(f, Range(-86.98f, 0.0f, 0.00137f), kE, 0.0L),
              1.25e-7);
    const std::vector<float> y =
        Take(f, {0.0f, -87.0f, -std::numeric_limits<float>::max(),
                 -std::numeric_limits<float>::infinity(),
                 std::numeric_limits<float>::quiet_NaN()});
    EXPECT_EQ(y[0], 1.0f);
    for (int i = 1; i < 4; ++i) EXPECT_EQ(y[i], 0.0f) << i;
    EXPECT_TRUE(std::isnan(y[4]));
  }
}

TEST(RoughExp2, OnEveryTarget) {
  for (int64_t rest = AvailableTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    SCOPED_TRACE(BestTargetName(target));
    const auto check = [](Function<float> f, float origin, double tolerance) {
      EXPECT_LE(LargestError(f, Range(-100.0f, 121.0f, 0.00173f), 2.0L, origin),
                tolerance);
      ExpectExtremes(f, 128.01f - origin, -170.0f);
    };
    check(FA2_TARGET_FUNCTION(TakeRoughExp2Degree3, target),
          HWY_NAMESPACE::RoughExp2Polynomial<3>::kOrigin, 7.6e-5);
    check(FA2_TARGET_FUNCTION(TakeRoughExp2Degree4, target),
          HWY_NAMESPACE::RoughExp2Polynomial<4>::kOrigin, 3e-6);
  }
}

}  // namespace
}  // namespace fa2::simd
#endif  // HWY_ONCE
