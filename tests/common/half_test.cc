// SPDX-License-Identifier: Apache-2.0

// Conversions between 16-bit storage and f32 or f64.
#include "src/common/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace fa2 {
namespace {

bool IsNanF16(uint32_t bits) { return (bits & 0x7FFFu) > 0x7C00u; }
bool IsNanBf16(uint32_t bits) { return (bits & 0x7FFFu) > 0x7F80u; }

TEST(Half, KnownValues) {
  EXPECT_EQ(F16ToF32(0x3C00), 1.0f);
  EXPECT_EQ(F16ToF32(0xC000), -2.0f);
  EXPECT_EQ(F16ToF32(0x7BFF), 65504.0f);
  EXPECT_EQ(F16ToF32(0x0001), 0x1p-24f);
  EXPECT_EQ(F16ToF32(0x03FF), 1023.0f * 0x1p-24f);
  EXPECT_EQ(F32ToF16(65519.0f), 0x7BFF);
  EXPECT_EQ(F32ToF16(65520.0f), 0x7C00);
  EXPECT_EQ(F32ToF16(0x1p-25f), 0x0000);
  EXPECT_EQ(F32ToF16(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(Bf16ToF32(0x3F80), 1.0f);
  EXPECT_EQ(F32ToBf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(F32ToBf16(-0.0f), 0x8000);
}

TEST(Half, EveryF16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto f16 = static_cast<uint16_t>(bits);
    if (IsNanF16(bits)) {
      EXPECT_TRUE(std::isnan(F16ToF32(f16)));
      EXPECT_TRUE(IsNanF16(F32ToF16(F16ToF32(f16))));
    } else {
      EXPECT_EQ(F32ToF16(F16ToF32(f16)), f16);
    }
  }
}

TEST(Half, EveryBf16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto bf16 = static_cast<uint16_t>(bits);
    if (IsNanBf16(bits)) {
      EXPECT_TRUE(IsNanBf16(F32ToBf16(Bf16ToF32(bf16))));
    } else {
      EXPECT_EQ(F32ToBf16(Bf16ToF32(bf16)), bf16);
    }
  }
}

// Between neighbours a < b of the storage type: below the middle gives a, above
// gives b, the middle gives the even one.
template <class ToF32, class FromF32, class FromF64>
void CheckRounding(uint32_t bits, const ToF32& to_f32, const FromF32& from_f32,
                   const FromF64& from_f64) {
  const auto low = static_cast<uint16_t>(bits);
  const auto high = static_cast<uint16_t>(bits + 1);
  const double a = to_f32(low);
  const double b = to_f32(high);
  const double middle = (a + b) / 2;
  const uint16_t even = (bits & 1u) == 0 ? low : high;
  const auto f32 = static_cast<float>(middle);
  ASSERT_EQ(static_cast<double>(f32), middle);
  EXPECT_EQ(from_f32(f32), even) << bits;
  EXPECT_EQ(from_f32(std::nextafter(f32, 0.0f)), low) << bits;
  EXPECT_EQ(from_f32(std::nextafter(f32, HUGE_VALF)), high) << bits;
  // So close to the middle that rounding to f32 first would end on it.
  EXPECT_EQ(from_f64(std::nextafter(middle, 0.0)), low) << bits;
  EXPECT_EQ(from_f64(std::nextafter(middle, HUGE_VAL)), high) << bits;
  EXPECT_EQ(from_f64(middle), even) << bits;
  EXPECT_EQ(from_f64(-std::nextafter(middle, HUGE_VAL)), high | 0x8000u)
      << bits;
}

TEST(Half, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7BFF; ++bits) {
    CheckRounding(bits, F16ToF32, F32ToF16, F64ToF16);
  }
  for (uint32_t bits = 1; bits < 0x7F7F; ++bits) {
    CheckRounding(bits, Bf16ToF32, F32ToBf16, F64ToBf16);
  }
}

TEST(Half, NanBecomesQuiet) {
  const float signaling = FloatOfBits(0x7F800001u);
  EXPECT_EQ(F32ToBf16(signaling), 0x7FC0);
  EXPECT_EQ(F32ToF16(signaling), 0x7E00);
  EXPECT_EQ(F32ToBf16(FloatOfBits(0xFF800001u)), 0xFFC0);
  EXPECT_TRUE(IsNanBf16(F64ToBf16(std::nan(""))));
  EXPECT_TRUE(IsNanF16(F64ToF16(std::nan(""))));
}

}  // namespace
}  // namespace fa2
