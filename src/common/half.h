// SPDX-License-Identifier: Apache-2.0

// bf16 and f16 as 16-bit storage: conversions by integer arithmetic, the same
// on every compiler and CPU. Rounding is to nearest, ties to even; overflow
// gives infinity; a NaN becomes a quiet NaN that keeps its sign.
#ifndef FA2_SRC_COMMON_HALF_H_
#define FA2_SRC_COMMON_HALF_H_

#include <cstdint>
#include <cstring>

namespace fa2 {

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FloatOfBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float Bf16ToF32(uint16_t bf16) {
  return FloatOfBits(static_cast<uint32_t>(bf16) << 16);
}

inline uint16_t F32ToBf16(float value) {
  const uint32_t bits = BitsOf(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  }
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float F16ToF32(uint16_t f16) {
  const uint32_t sign = static_cast<uint32_t>(f16 & 0x8000u) << 16;
  const uint32_t magnitude = f16 & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // infinity, NaN
    return FloatOfBits(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  }
  if (magnitude >= 0x0400u) {  // the exponent's bias goes from 15 to 127
    return FloatOfBits(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
  }
  // Zero or subnormal: magnitude * 2^-24, exact in f32.
  const float value = static_cast<float>(magnitude) * 5.9604644775390625e-08f;
  return FloatOfBits(sign | BitsOf(value));
}

inline uint16_t F32ToF16(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  }
  // 65520 = halfway between f16's largest, 65504, and 2^16.
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude >= 0x38800000u) {  // 2^-14 and more: normal
    const uint32_t rounded = magnitude + 0x0FFFu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign |
                                 ((rounded - ((127u - 15u) << 23)) >> 13));
  }
  // 2^-25 and less is half of the smallest subnormal, a tie with even 0.
  if (magnitude <= 0x33000000u) return static_cast<uint16_t>(sign);
  const uint32_t exponent = magnitude >> 23;  // 102 .. 112 here
  const uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
  const uint32_t shift = 126u - exponent;  // mantissa >> shift counts 2^-24
  const uint32_t half = 1u << (shift - 1u);
  const uint32_t odd = (mantissa >> shift) & 1u;
  return static_cast<uint16_t>(sign | ((mantissa + half - 1u + odd) >> shift));
}

// The f32 next to `value` towards zero, with its last bit set when anything
// was cut off ("round to odd"): rounding the result once more, to bf16 or f16,
// gives what rounding `value` directly would.
inline float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  if (!(static_cast<double>(nearest) != value)) return nearest;  // exact
  if (value != value) return nearest;                            // NaN
  uint32_t bits = BitsOf(nearest);
  const double magnitude = value < 0 ? -value : value;
  const double rounded = nearest < 0 ? -static_cast<double>(nearest)
                                     : static_cast<double>(nearest);
  if (rounded > magnitude) --bits;
  return FloatOfBits(bits | 1u);
}

inline uint16_t F64ToBf16(double value) { return F32ToBf16(RoundToOdd(value)); }
inline uint16_t F64ToF16(double value) { return F32ToF16(RoundToOdd(value)); }

}  // namespace fa2

#endif  // FA2_SRC_COMMON_HALF_H_
