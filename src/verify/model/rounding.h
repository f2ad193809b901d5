// SPDX-License-Identifier: Apache-2.0

// Where a kernel rounds what it multiplies and what it stores.
#ifndef FA2_SRC_VERIFY_MODEL_ROUNDING_H_
#define FA2_SRC_VERIFY_MODEL_ROUNDING_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fa2/types.h"
#include "src/common/half.h"
#include "src/verify/cases/case.h"

namespace fa2::verify {

// Relative error of one rounding at most.
inline double UnitRoundoff(Products products) {
  switch (products) {
    case Products::kBF16:
      return 0x1p-8;
    case Products::kF16:
    case Products::kTF32:
      return 0x1p-11;
    case Products::kF32:
      return 0x1p-24;
    case Products::kF64:
      return 0x1p-53;
  }
  return 0.0;
}

inline double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 0x1p-8;
    case DType::kF16:
      return 0x1p-11;
    case DType::kF64:
      return 0x1p-53;
    default:
      return 0x1p-24;
  }
}

// To f16, with what is past its range at its largest: an infinity in one
// product would hide the rounding of all others.
inline float RoundF16(float x) {
  if (std::abs(x) > 65504.0f) return std::copysign(65504.0f, x);
  return F16ToF32(F32ToF16(x));
}

// To 10 bits behind the point, ties to even, of a finite f32.
inline float RoundTF32(float x) {
  const uint32_t bits = BitsOf(x);
  return FloatOfBits((bits + 0x0FFFu + ((bits >> 13) & 1u)) & ~0x1FFFu);
}

// The operands of a product, each rounded.
template <class T>
void RoundRow(Products products, T* x, int64_t n) {
  switch (products) {
    case Products::kBF16:
      for (int64_t i = 0; i < n; ++i) {
        x[i] = static_cast<T>(Bf16ToF32(F32ToBf16(static_cast<float>(x[i]))));
      }
      break;
    case Products::kF16:
      for (int64_t i = 0; i < n; ++i) {
        x[i] = static_cast<T>(RoundF16(static_cast<float>(x[i])));
      }
      break;
    case Products::kTF32:
      for (int64_t i = 0; i < n; ++i) {
        x[i] = static_cast<T>(RoundTF32(static_cast<float>(x[i])));
      }
      break;
    case Products::kF32:
    case Products::kF64:
      break;
  }
}

// What a result is stored as; past f16's range it is left at the largest.
inline double RoundStored(DType dtype, double x) {
  switch (dtype) {
    case DType::kBF16:
      return Bf16ToF32(F64ToBf16(x));
    case DType::kF16:
      if (std::abs(x) > 65504.0) return std::copysign(65504.0, x);
      return F16ToF32(F64ToF16(x));
    case DType::kF32:
      return static_cast<float>(x);
    default:
      return x;
  }
}

// Half the distance between a value and its neighbour in the dtype.
inline double HalfUlp(DType dtype, double value) {
  // Smallest subnormals: 2^-24 (f16), 2^-133 (bf16), 2^-149 (f32).
  const double least = dtype == DType::kF16    ? 0x1p-25
                       : dtype == DType::kBF16 ? 0x1p-134
                       : dtype == DType::kF32  ? 0x1p-150
                                               : 0.0;
  if (value == 0.0 || !std::isfinite(value)) return least;
  return std::max(least, std::ldexp(UnitRoundoff(dtype), std::ilogb(value)));
}

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_ROUNDING_H_
