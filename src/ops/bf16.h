// Single elements of f32 and of bf16, by the type they are stored in.
#ifndef FA2_SRC_OPS_BF16_H_
#define FA2_SRC_OPS_BF16_H_

#include <cstdint>

#include "src/common/half.h"

namespace fa2::ops {

using Bf16 = uint16_t;

inline float ToFloat(float x) { return x; }
inline float ToFloat(Bf16 x) { return Bf16ToF32(x); }

// Rounds to nearest even; NaN becomes a quiet NaN.
inline void FromFloat(float f, float* to) { *to = f; }
inline void FromFloat(float f, Bf16* to) { *to = F32ToBf16(f); }

}  // namespace fa2::ops

#endif  // FA2_SRC_OPS_BF16_H_
