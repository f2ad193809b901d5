// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/direct/direct.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/highway.h"
#include "src/simd/direct/direct.h"
#include "src/simd/direct/products-inl.h"
#include "src/simd/direct/scores-inl.h"
#include "src/simd/direct/widen-inl.h"
#include "src/simd/math/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
struct DirectFunctions : DirectWiden<T> {
  using typename DirectWiden<T>::D;
  using typename DirectWiden<T>::V;
  using DirectWiden<T>::At;
  using DirectWiden<T>::ForWideVectors;
  using DirectWiden<T>::WidenRows;

  static void Widen(const Rows& rows, DirectRows out) {
    WithStored<T>(rows.dtype,
                  [&](auto tag) HWY_ATTR { WidenRows(tag, rows, out); });
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
        most = hn::Max(most, hn::And(LoadUpTo(d, in + c, depth - c), exponent));
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
    WithStored<T>(rows.dtype, [&](auto tag) HWY_ATTR {
      ForWideVectors(
          tag, rows, out.stride, [&](V v, int64_t r, size_t c) HWY_ATTR {
            const auto finite = hn::Lt(hn::Abs(v), hn::Inf(d));
            hn::Store(hn::IfThenElseZero(finite, v), d, At(out, r, c));
          });
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
