// SPDX-License-Identifier: Apache-2.0

// Loads and stores of 16-bit floats on every target, bit for bit against the
// scalar conversions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "src/common/half.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/simd/convert_test.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/highway.h"
#include "src/simd/math/load-inl.h"
#include "src/simd/math/store-inl.h"
#include "src/simd/target.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

// The arrays have room for a whole vector past `count`.
template <class Stored>
void WidenAll(Stored tag, const uint16_t* from, size_t count, float* to) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d))
    hn::StoreU(LoadWide(d, tag, from + i), d, to + i);
}
template <class Stored>
void NarrowAll(Stored tag, const float* from, size_t count, uint16_t* to) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d))
    StoreNarrow(d, tag, hn::LoadU(d, from + i), to + i);
}

void WidenF16(const uint16_t* from, size_t count, float* to) {
  WidenAll(StoredF16(), from, count, to);
}
void WidenBf16(const uint16_t* from, size_t count, float* to) {
  WidenAll(StoredBF16(), from, count, to);
}
void NarrowF16(const float* from, size_t count, uint16_t* to) {
  NarrowAll(StoredF16(), from, count, to);
}
void NarrowBf16(const float* from, size_t count, uint16_t* to) {
  NarrowAll(StoredBF16(), from, count, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fa2::simd {

HWY_EXPORT(WidenF16);
HWY_EXPORT(WidenBf16);
HWY_EXPORT(NarrowF16);
HWY_EXPORT(NarrowBf16);

namespace {

// The greatest vector of any target, in floats.
constexpr size_t kPadding = HWY_MAX_BYTES / sizeof(float);

bool IsNan16(uint16_t bits, uint16_t infinity) {
  return (bits & 0x7FFF) > infinity;
}

void ExpectWide(const std::vector<float>& actual, float (*scalar)(uint16_t)) {
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const float expected = scalar(static_cast<uint16_t>(i));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(actual[i])) << std::hex << i;
      ASSERT_EQ(std::signbit(actual[i]), std::signbit(expected)) << i;
    } else {
      ASSERT_EQ(BitsOf(actual[i]), BitsOf(expected)) << std::hex << i;
    }
  }
}

void ExpectNarrow(const std::vector<float>& from,
                  const std::vector<uint16_t>& actual, size_t count,
                  uint16_t infinity, uint16_t (*scalar)(float)) {
  for (size_t i = 0; i < count; ++i) {
    const uint16_t expected = scalar(from[i]);
    if (IsNan16(expected, infinity)) {
      ASSERT_TRUE(IsNan16(actual[i], infinity))
          << std::hex << BitsOf(from[i]) << " gave " << actual[i];
      ASSERT_EQ(actual[i] >> 15, expected >> 15);
    } else {
      ASSERT_EQ(actual[i], expected) << std::hex << BitsOf(from[i]);
    }
  }
}

// Every upper half with lower halves at and around the ties of both types.
std::vector<float> Floats() {
  std::vector<float> floats;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const uint32_t lower :
         {0x0000u, 0x0001u, 0x0FFFu, 0x1000u, 0x1001u, 0x3000u, 0x7FFFu,
          0x8000u, 0x8001u, 0xF000u, 0xFFFFu}) {
      floats.push_back(FloatOfBits(upper << 16 | lower));
    }
  }
  return floats;
}

TEST(Convert, SixteenBitFloatsOnEveryTarget) {
  std::vector<uint16_t> halves(0x10000 + kPadding);
  for (uint32_t i = 0; i < 0x10000; ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> floats = Floats();
  const size_t count = floats.size();
  floats.resize(count + kPadding);
  for (int64_t rest = AvailableTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    SCOPED_TRACE(BestTargetName(target));
    std::vector<float> wide(halves.size() + kPadding);
    std::vector<uint16_t> narrow(floats.size() + kPadding);
    FA2_TARGET_FUNCTION(WidenF16, target)
    (halves.data(), 0x10000, wide.data());
    ExpectWide(wide, F16ToF32);
    FA2_TARGET_FUNCTION(WidenBf16, target)
    (halves.data(), 0x10000, wide.data());
    ExpectWide(wide, Bf16ToF32);
    FA2_TARGET_FUNCTION(NarrowF16, target)
    (floats.data(), count, narrow.data());
    ExpectNarrow(floats, narrow, count, 0x7C00, F32ToF16);
    FA2_TARGET_FUNCTION(NarrowBf16, target)
    (floats.data(), count, narrow.data());
    ExpectNarrow(floats, narrow, count, 0x7F80, F32ToBf16);
  }
}

}  // namespace
}  // namespace fa2::simd
#endif  // HWY_ONCE
