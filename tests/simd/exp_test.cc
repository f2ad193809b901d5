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
#include "src/simd/exp-inl.h"
#include "src/simd/target.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

// The arrays have room for a whole vector past `count`.
void TakeExp(const float* from, size_t count, float* to) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    hn::StoreU(Exp(d, hn::LoadU(d, from + i)), d, to + i);
  }
}
// Four vectors at a time; room for that past `count`.
void TakeExpAbreast(const float* from, size_t count, float* to) {
  const hn::ScalableTag<float> d;
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

HWY_EXPORT(TakeExp);
HWY_EXPORT(TakeExpAbreast);
HWY_EXPORT(TakeRoughExp2Degree3);
HWY_EXPORT(TakeRoughExp2Degree4);

namespace {

using Function = void (*)(const float*, size_t, float*);

// No four vectors of any target have more floats (SVE: 2,048 bits).
constexpr size_t kPadding = 4 * 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> Take(Function f, std::vector<float> x) {
  const size_t count = x.size();
  x.resize(count + kPadding);
  std::vector<float> y(x.size());
  f(x.data(), count, y.data());
  y.resize(count);
  return y;
}

std::vector<float> Range(float first, float last, float step) {
  std::vector<float> x;
  for (float at = first; at <= last; at += step) x.push_back(at);
  return x;
}

// Relative to exp2(x log2_base + origin).
double LargestError(Function f, const std::vector<float>& x, double log2_base,
                    double origin) {
  const std::vector<float> y = Take(f, x);
  double largest = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact =
        std::exp2(static_cast<double>(x[i]) * log2_base + origin);
    const double error = std::abs(static_cast<double>(y[i]) / exact - 1.0);
    largest = std::max(largest, std::isnan(error) ? HUGE_VAL : error);
  }
  return largest;
}

// Beyond what f32 holds, in the unit of the argument: +inf above, exactly 0
// below, NaN for NaN.
void ExpectExtremes(Function f, float above, float below) {
  const std::vector<float> y =
      Take(f, {above, 3e38f, kInfinity, below, -3e38f, -kInfinity,
               std::numeric_limits<float>::quiet_NaN()});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(y[i], kInfinity) << i;
  for (int i = 3; i < 6; ++i) EXPECT_EQ(y[i], 0.0f) << i;
  EXPECT_TRUE(std::isnan(y[6]));
}

TEST(Exp, OnEveryTarget) {
  for (int64_t rest = AvailableTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    SCOPED_TRACE(BestTargetName(target));
    for (const Function f : {FA2_TARGET_FUNCTION(TakeExp, target),
                             FA2_TARGET_FUNCTION(TakeExpAbreast, target)}) {
      // The argument's product with log2(e), rounded: ln(2) 2^-24 of 29 and
      // 127.
      EXPECT_LE(
          LargestError(f, Range(-20.0f, 20.0f, 0.00137f), std::log2(M_E), 0.0),
          1.5e-6);
      EXPECT_LE(
          LargestError(f, Range(-69.0f, 88.7f, 0.00931f), std::log2(M_E), 0.0),
          8e-6);
      ExpectExtremes(f, 89.0f, -71.0f);
    }
  }
}

TEST(RoughExp2, OnEveryTarget) {
  for (int64_t rest = AvailableTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    SCOPED_TRACE(BestTargetName(target));
    const auto check = [](Function f, float origin, double tolerance) {
      EXPECT_LE(LargestError(f, Range(-100.0f, 121.0f, 0.00173f), 1.0, origin),
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
