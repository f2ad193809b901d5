// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/direct/direct.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/highway.h"
#include "src/simd/direct/direct.h"
#include "src/simd/direct/products-inl.h"
#include "src/simd/direct/scores-inl.h"
#include "src/simd/math/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The bits of the exponent, which what is not finite has all set.
constexpr uint32_t ExponentBits(StoredF32) { return 0x7F800000; }
constexpr uint64_t ExponentBits(StoredF64) { return 0x7FF0000000000000; }
constexpr uint16_t ExponentBits(StoredBF16) { return 0x7F80; }
constexpr uint16_t ExponentBits(StoredF16) { return 0x7C00; }

template <typename T>
struct DirectFunctions {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;

  // Calls body(vector, row, column) for the widened vectors of rows, up to the
  // stride of `like`.
  template <class Body>
  static void ForVectors(const Rows& rows, const DirectRows& like,
                         const Body& body) {
    WithStored<T>(rows.dtype, [&](auto tag) HWY_ATTR {
      using Stored = decltype(tag);
      const D d;
      const size_t lanes = hn::Lanes(d);
      const size_t depth = static_cast<size_t>(rows.depth);
      for (int64_t r = 0; r < rows.rows; ++r) {
        const auto* in = static_cast<const typename Stored::Type*>(rows.data) +
                         r * rows.stride;
        size_t c = 0;
        for (; c + lanes <= depth; c += lanes) {
          body(LoadWide(d, tag, in + c), r, c);
        }
        if (c < depth) {
          body(LoadWideTail(d, tag, in + c, depth - c), r, c);
          c += lanes;
        }
        for (; c < static_cast<size_t>(like.stride); c += lanes) {
          body(hn::Zero(d), r, c);
        }
      }
    });
  }

  static T* At(const DirectRows& rows, int64_t r, size_t c) {
    return static_cast<T*>(rows.data) + r * rows.stride + c;
  }

  static void Widen(const Rows& rows, DirectRows out) {
    ForVectors(rows, out, [&](V v, int64_t r, size_t c) HWY_ATTR {
      hn::Store(v, D(), At(out, r, c));
    });
  }

  // Whether all elements are finite: their exponents are looked at in their own
  // width, a whole vector of them at a time.
  template <class Stored>
  static bool AllFinite(const Rows& rows, Stored /*tag*/) {
    using Bits = hwy::UnsignedFromSize<sizeof(typename Stored::Type)>;
    const hn::ScalableTag<Bits> d;
    const auto exponent = hn::Set(d, ExponentBits(Stored()));
    const size_t lanes = hn::Lanes(d);
    const size_t depth = static_cast<size_t>(rows.depth);
    auto most = hn::Zero(d);
    for (int64_t r = 0; r < rows.rows; ++r) {
      const auto* in = static_cast<const Bits*>(rows.data) + r * rows.stride;
      for (size_t c = 0; c < depth; c += lanes) {
        const auto bits = depth - c < lanes ? LoadTail(d, in + c, depth - c)
                                            : hn::LoadU(d, in + c);
        most = hn::Max(most, hn::And(bits, exponent));
      }
    }
    return hn::AllTrue(d, hn::Lt(most, exponent));
  }

  static bool WidenFinite(const Rows& rows, DirectRows out) {
    bool finite = false;
    WithStored<T>(rows.dtype,
                  [&](auto tag) HWY_ATTR { finite = AllFinite(rows, tag); });
    if (finite) return false;
    const D d;
    ForVectors(rows, out, [&](V v, int64_t r, size_t c) HWY_ATTR {
      const auto finite = hn::Lt(hn::Abs(v), hn::Inf(d));
      hn::Store(hn::IfThenElseZero(finite, v), d, At(out, r, c));
    });
    return true;
  }

  static const DirectKernels* Get() {
    static const DirectKernels kernels = {DirectProducts<T>::Multiply,
                                          DirectProducts<T>::Combine,
                                          DirectProducts<T>::Spread,
                                          DirectScorePass<T>::Forward,
                                          DirectScorePass<T>::Backward,
                                          Widen,
                                          WidenFinite};
    return &kernels;
  }
};

const DirectKernels* GetF32DirectKernels() {
  return DirectFunctions<float>::Get();
}
const DirectKernels* GetF64DirectKernels() {
  return DirectFunctions<double>::Get();
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "src/simd/target.h"

namespace fa2::simd {

HWY_EXPORT(GetF32DirectKernels);
HWY_EXPORT(GetF64DirectKernels);

const DirectKernels* DirectKernelsFor(DType accumulator, int64_t targets) {
  return accumulator == DType::kF64
             ? FA2_TARGET_FUNCTION(GetF64DirectKernels, targets)()
             : FA2_TARGET_FUNCTION(GetF32DirectKernels, targets)();
}

}  // namespace fa2::simd

#endif  // HWY_ONCE
