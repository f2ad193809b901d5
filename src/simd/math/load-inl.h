// SPDX-License-Identifier: Apache-2.0

// Reading rows of any float dtype as vectors of f32 or f64.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_MATH_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_MATH_LOAD_INL_H_
#undef FA2_SRC_SIMD_MATH_LOAD_INL_H_
#else
#define FA2_SRC_SIMD_MATH_LOAD_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fa2/types.h"
#include "hwy/highway.h"
#include "src/simd/math/f16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Storage tags: what an element is in memory.
struct StoredF32 {
  using Type = float;
};
struct StoredF64 {
  using Type = double;
};
struct StoredBF16 {
  using Type = uint16_t;
};
struct StoredF16 {
  using Type = uint16_t;
};
// T in memory as it is in registers.
template <typename T>
using StoredAs = std::conditional_t<sizeof(T) == 8, StoredF64, StoredF32>;

// The bits of the exponent, which what is not finite has all set.
constexpr uint32_t ExponentBits(StoredF32) { return 0x7F800000; }
constexpr uint64_t ExponentBits(StoredF64) { return 0x7FF0000000000000; }
constexpr uint16_t ExponentBits(StoredBF16) { return 0x7F80; }
constexpr uint16_t ExponentBits(StoredF16) { return 0x7C00; }

// Selects an overload by the width of D's lanes.
template <class D, size_t kBytes>
using IfLaneBytes = std::enable_if_t<sizeof(hn::TFromD<D>) == kBytes, int>;

// Unaligned load of Lanes(d) elements as f32.
template <class D, IfLaneBytes<D, 4> = 0>
HWY_INLINE hn::Vec<D> LoadWide(D d, StoredF32, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> PromoteBf16(D d, hn::Vec<hn::Rebind<uint16_t, D>> v) {
  const hn::RebindToUnsigned<D> du;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, v)));
}
template <class D, IfLaneBytes<D, 4> = 0>
HWY_INLINE hn::Vec<D> LoadWide(D d, StoredBF16, const uint16_t* p) {
  return PromoteBf16(d, hn::LoadU(hn::Rebind<uint16_t, D>(), p));
}
template <class D, IfLaneBytes<D, 4> = 0>
HWY_INLINE hn::Vec<D> LoadWide(D d, StoredF16, const uint16_t* p) {
  return LoadF16(d, p);
}
template <class D, IfLaneBytes<D, 4> = 0>
HWY_INLINE hn::Vec<D> LoadWide(D d, StoredF64, const double* p) {
  HWY_ALIGN float narrow[HWY_MAX_BYTES / sizeof(float)];
  for (size_t i = 0; i < hn::Lanes(d); ++i) {
    narrow[i] = static_cast<float>(p[i]);
  }
  return hn::Load(d, narrow);
}
// Widened to f64; 16 bits by way of f32.
template <class D, IfLaneBytes<D, 8> = 0>
HWY_INLINE hn::Vec<D> LoadWide(D d, StoredF64, const double* p) {
  return hn::LoadU(d, p);
}
template <class D, class Stored, IfLaneBytes<D, 8> = 0>
HWY_INLINE hn::Vec<D> LoadWide(D d, Stored tag,
                               const typename Stored::Type* p) {
  const hn::Rebind<float, D> d32;
  return hn::PromoteTo(d, LoadWide(d32, tag, p));
}

// Whether masked loads of elements of so many bytes, and masked stores, leave
// alone what the mask leaves out. Stores by AVX2, which would, are not used:
// they are many micro-operations on AMD.
template <size_t kBytes>
inline constexpr bool kMasksLoads =
    HWY_TARGET <= (kBytes < 4 ? HWY_AVX3 : HWY_AVX2) && HWY_ARCH_X86;
inline constexpr bool kMasksStores = HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3;

// Not memset of an array: GCC 14 takes a count of bytes for one of elements
// where it happens to be that too.
HWY_INLINE void FillWithZeros(void* to, size_t bytes) { memset(to, 0, bytes); }

// The first `count` < Lanes(d) elements, zeros behind them; reads no byte past
// them. Masked, since a load from a buffer waits until the narrower stores that
// filled it have left for the cache.
template <class D>
HWY_INLINE hn::Vec<D> LoadTail(D d, const hn::TFromD<D>* p, size_t count) {
  using T = hn::TFromD<D>;
  if constexpr (kMasksLoads<sizeof(T)>) {
    return hn::MaskedLoad(hn::FirstN(d, count), d, p);
  } else {
    HWY_ALIGN T buffer[HWY_MAX_BYTES / sizeof(T)];
    FillWithZeros(buffer, hn::Lanes(d) * sizeof(T));
    memcpy(buffer, p, count * sizeof(T));
    return hn::Load(d, buffer);
  }
}

// The first `count` elements, at most Lanes(d).
template <class D>
HWY_INLINE hn::Vec<D> LoadUpTo(D d, const hn::TFromD<D>* p, size_t count) {
  return count < hn::Lanes(d) ? LoadTail(d, p, count) : hn::LoadU(d, p);
}

// The first `count` < Lanes(d), widened.
template <class D, class Stored>
HWY_INLINE hn::Vec<D> LoadWideTail(D d, Stored tag,
                                   const typename Stored::Type* p,
                                   size_t count) {
  using Type = typename Stored::Type;
  if constexpr (std::is_same_v<Type, hn::TFromD<D>>) {
    return LoadTail(d, p, count);
  } else if constexpr (std::is_same_v<Stored, StoredBF16> &&
                       sizeof(hn::TFromD<D>) == 4) {
    return PromoteBf16(d, LoadTail(hn::Rebind<uint16_t, D>(), p, count));
  } else {
    // Not all of it: RISC-V's longest vectors have 64 KiB. Not MaxLanes(D()):
    // under SVE Highway 1.0.3 makes that too few for tags of part of a vector.
    HWY_ALIGN Type buffer[HWY_MAX_BYTES / 2];
    FillWithZeros(buffer, hn::Lanes(d) * sizeof(buffer[0]));
    memcpy(buffer, p, count * sizeof(buffer[0]));
    return LoadWide(d, tag, buffer);
  }
}

// Calls visit(tag) with the storage tag of any float dtype.
template <class Visitor>
HWY_INLINE void WithAnyStored(DType dtype, const Visitor& visit) {
  if (dtype == DType::kBF16) return visit(StoredBF16());
  if (dtype == DType::kF16) return visit(StoredF16());
  if (dtype == DType::kF64) return visit(StoredF64());
  return visit(StoredF32());
}

// The same for the dtypes of tensors that are computed in T.
template <typename T, class Visitor>
HWY_INLINE void WithStored(DType dtype, const Visitor& visit) {
  if constexpr (sizeof(T) == 8) {
    if (dtype == DType::kF64) return visit(StoredF64());
    return visit(StoredF32());
  } else {
    if (dtype == DType::kBF16) return visit(StoredBF16());
    if (dtype == DType::kF16) return visit(StoredF16());
    return visit(StoredF32());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
