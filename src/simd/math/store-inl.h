// SPDX-License-Identifier: Apache-2.0

// Writing vectors of f32 or f64 as any float dtype, rounded to nearest even.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_MATH_STORE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_MATH_STORE_INL_H_
#undef FA2_SRC_SIMD_MATH_STORE_INL_H_
#else
#define FA2_SRC_SIMD_MATH_STORE_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hwy/highway.h"
#include "src/common/half.h"
#include "src/simd/math/f16-inl.h"
#include "src/simd/math/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, IfLaneBytes<D, 4> = 0>
HWY_INLINE void StoreNarrow(D d, StoredF32, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}
// f32 to bf16, to nearest even, in integers, so that every target gives the
// same bits; a NaN becomes a quiet NaN that keeps its sign and upper payload.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> NarrowToBf16(D /*d*/,
                                                         hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  // Not Ne: on x86 Highway 1.0.3 makes it false for a NaN.
  const auto nan = hn::RebindMask(du, hn::Not(hn::Eq(v, v)));
  const auto result = hn::IfThenElse(nan, quiet, rounded);
  return hn::TruncateTo(d16, hn::ShiftRight<16>(result));
}
template <class D, IfLaneBytes<D, 4> = 0>
HWY_INLINE void StoreNarrow(D d, StoredBF16, hn::Vec<D> v, uint16_t* p) {
  hn::StoreU(NarrowToBf16(d, v), hn::Rebind<uint16_t, D>(), p);
}
template <class D, IfLaneBytes<D, 4> = 0>
HWY_INLINE void StoreNarrow(D d, StoredF16, hn::Vec<D> v, uint16_t* p) {
  StoreF16(d, v, p);
}
template <class D, IfLaneBytes<D, 4> = 0>
HWY_INLINE void StoreNarrow(D d, StoredF64, hn::Vec<D> v, double* p) {
  HWY_ALIGN float narrow[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(v, d, narrow);
  for (size_t i = 0; i < hn::Lanes(d); ++i) p[i] = narrow[i];
}
template <class D, IfLaneBytes<D, 8> = 0>
HWY_INLINE void StoreNarrow(D d, StoredF64, hn::Vec<D> v, double* p) {
  hn::StoreU(v, d, p);
}
template <class D, IfLaneBytes<D, 8> = 0>
HWY_INLINE void StoreNarrow(D /*d*/, StoredF32, hn::Vec<D> v, float* p) {
  const hn::Rebind<float, D> d32;
  hn::StoreU(hn::DemoteTo(d32, v), d32, p);
}
// One by one: by way of f32 a value near the middle between two neighbours
// would be rounded twice.
template <class D, class Stored, IfLaneBytes<D, 8> = 0>
HWY_INLINE void StoreNarrow(D d, Stored, hn::Vec<D> v, uint16_t* p) {
  HWY_ALIGN double wide[HWY_MAX_BYTES / sizeof(double)];
  hn::Store(v, d, wide);
  for (size_t i = 0; i < hn::Lanes(d); ++i) {
    p[i] = std::is_same_v<Stored, StoredBF16> ? F64ToBf16(wide[i])
                                              : F64ToF16(wide[i]);
  }
}

// The first `count` < Lanes(d) elements; writes no byte past them.
template <class D, class Stored>
HWY_INLINE void StoreNarrowTail(D d, Stored tag, hn::Vec<D> v,
                                typename Stored::Type* p, size_t count) {
  using Type = typename Stored::Type;
  if constexpr (kMasksStores) {
    if constexpr (std::is_same_v<Type, hn::TFromD<D>>) {
      return hn::BlendedStore(v, hn::FirstN(d, count), d, p);
    } else if constexpr (std::is_same_v<Stored, StoredBF16> &&
                         sizeof(hn::TFromD<D>) == 4) {
      const hn::Rebind<uint16_t, D> d16;
      return hn::BlendedStore(NarrowToBf16(d, v), hn::FirstN(d16, count), d16,
                              p);
    }
  }
  HWY_ALIGN Type buffer[HWY_MAX_BYTES / 2];
  StoreNarrow(d, tag, v, buffer);
  memcpy(p, buffer, count * sizeof(buffer[0]));
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
