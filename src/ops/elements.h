// SPDX-License-Identifier: Apache-2.0

// Single elements by the type they are stored in.
#ifndef FA2_SRC_OPS_ELEMENTS_H_
#define FA2_SRC_OPS_ELEMENTS_H_

#include <cstdint>

#include "fa2/types.h"
#include "src/common/half.h"

namespace fa2::ops {

using Bf16 = uint16_t;
struct F16 {
  uint16_t bits;
};

// What kernels compute in: f64 for f64, f32 for the others.
template <typename T>
struct ComputedIn {
  using Type = float;
};
template <>
struct ComputedIn<double> {
  using Type = double;
};
template <typename T>
using Computed = typename ComputedIn<T>::Type;

inline size_t ComputedSize(DType dtype) {
  return dtype == DType::kF64 ? sizeof(double) : sizeof(float);
}

inline float Widen(float x) { return x; }
inline float Widen(Bf16 x) { return Bf16ToF32(x); }
inline float Widen(F16 x) { return F16ToF32(x.bits); }
inline double Widen(double x) { return x; }

// Rounds to nearest even; NaN becomes a quiet NaN.
inline void Narrow(float f, float* to) { *to = f; }
inline void Narrow(float f, Bf16* to) { *to = F32ToBf16(f); }
inline void Narrow(float f, F16* to) { to->bits = F32ToF16(f); }
inline void Narrow(double f, double* to) { *to = f; }
inline void Narrow(double f, float* to) { *to = static_cast<float>(f); }

// Calls visit(T()) with the type of the elements of a float dtype.
template <class Visitor>
void WithElement(DType dtype, const Visitor& visit) {
  if (dtype == DType::kBF16) return visit(Bf16());
  if (dtype == DType::kF16) return visit(F16());
  if (dtype == DType::kF64) return visit(double());
  return visit(float());
}

// Calls visit(T(), W()) where `other` is `dtype` or f32.
template <class Visitor>
void WithElements(DType dtype, DType other, const Visitor& visit) {
  WithElement(dtype, [&](auto element) {
    if (other == dtype) return visit(element, element);
    visit(element, float());
  });
}

}  // namespace fa2::ops

#endif  // FA2_SRC_OPS_ELEMENTS_H_
