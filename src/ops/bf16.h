// Single bf16 values, stored in uint16_t: the upper half of an f32.
#ifndef FA2_SRC_OPS_BF16_H_
#define FA2_SRC_OPS_BF16_H_

#include <cstdint>
#include <cstring>

namespace fa2::ops {

using Bf16 = uint16_t;

inline float ToFloat(float x) { return x; }
inline float ToFloat(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

// Rounds to nearest even; NaN becomes a quiet NaN.
inline void FromFloat(float f, float* to) { *to = f; }
inline void FromFloat(float f, Bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof(bits));
  *to = f != f ? static_cast<Bf16>((bits >> 16) | 0x40)
               : static_cast<Bf16>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace fa2::ops

#endif  // FA2_SRC_OPS_BF16_H_
