// SPDX-License-Identifier: Apache-2.0

// f16 to f32 and back. Highway 1.0.3 converts f16 with arithmetic of its own on
// x86 without F16C: it truncates, and reads and writes infinity and NaN as
// finite numbers. Here the same is done in full.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_MATH_F16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_MATH_F16_INL_H_
#undef FA2_SRC_SIMD_MATH_F16_INL_H_
#else
#define FA2_SRC_SIMD_MATH_F16_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#undef FA2_HAVE_F16_INSTRUCTIONS
#if HWY_ARCH_ARM_A64 || \
    (HWY_ARCH_X86 && HWY_TARGET < HWY_SSE4 && !defined(HWY_DISABLE_F16C))
#define FA2_HAVE_F16_INSTRUCTIONS 1
#else
#define FA2_HAVE_F16_INSTRUCTIONS 0
#endif

// Exact; a NaN stays one.
template <class D>
HWY_INLINE hn::Vec<D> LoadF16(D d, const uint16_t* p) {
#if FA2_HAVE_F16_INSTRUCTIONS
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(
      d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#else
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<int32_t, D> di;
  const auto bits = hn::PromoteTo(di, hn::LoadU(d16, p));
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7FFF));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(di, 0x8000)));
  // The exponent's bias goes from 15 to 127, that of infinity and NaN from 31
  // to 255.
  const auto special = hn::Gt(magnitude, hn::Set(di, 0x7BFF));
  const auto bias = hn::IfThenElse(special, hn::Set(di, (255 - 31) << 23),
                                   hn::Set(di, (127 - 15) << 23));
  const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), bias);
  const auto subnormal = hn::BitCast(
      di, hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-24f)));
  const auto value =
      hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x0400)), subnormal, normal);
  return hn::BitCast(d, hn::Or(value, sign));
#endif
}

// To nearest even; NaN becomes a quiet NaN of the same sign.
template <class D>
HWY_INLINE void StoreF16(D d, hn::Vec<D> v, uint16_t* p) {
#if FA2_HAVE_F16_INSTRUCTIONS
  (void)d;
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
#else
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<uint32_t, D> du;
  const auto bits = hn::BitCast(di, v);
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7FFFFFFF));
  const auto sign =
      hn::And(hn::BitCast(di, hn::ShiftRight<16>(hn::BitCast(du, bits))),
              hn::Set(di, 0x8000));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 1));
  const auto rounded = hn::Add(magnitude, hn::Add(odd, hn::Set(di, 0x0FFF)));
  const auto normal =
      hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(di, (127 - 15) << 23)));
  // A unit in the last place of 0.5 is 2^-24, the step of f16's subnormals: the
  // addition rounds to it.
  const auto half = hn::Set(d, 0.5f);
  const auto subnormal =
      hn::Sub(hn::BitCast(di, hn::Add(hn::BitCast(d, magnitude), half)),
              hn::BitCast(di, half));
  auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x38800000)),
                              subnormal, normal);
  // From 65520, halfway between f16's largest and 2^16.
  value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x477FEFFF)),
                         hn::Set(di, 0x7C00), value);
  const auto payload =
      hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 0x03FF));
  value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7F800000)),
                         hn::Or(payload, hn::Set(di, 0x7E00)), value);
  hn::StoreU(hn::TruncateTo(d16, hn::BitCast(du, hn::Or(value, sign))), d16, p);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
