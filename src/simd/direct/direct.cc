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

  static bool WidenFinite(const Rows& rows, DirectRows out) {
    const D d;
    // 0 times what is not finite is NaN. Four sums: one would wait for itself.
    V sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    WithStored<T>(rows.dtype, [&](auto tag) HWY_ATTR {
      using Stored = decltype(tag);
      const size_t lanes = hn::Lanes(d);
      const auto* const data =
          static_cast<const typename Stored::Type*>(rows.data);
      const auto add = [&](size_t c, int64_t r, V& sum) HWY_ATTR {
        const size_t left = static_cast<size_t>(rows.depth) - c;
        const auto* const in = data + r * rows.stride + c;
        const V v = left < lanes ? LoadWideTail(d, tag, in, left)
                                 : LoadWide(d, tag, in);
        sum = hn::MulAdd(v, hn::Zero(d), sum);
      };
      for (size_t c = 0; c < static_cast<size_t>(rows.depth); c += lanes) {
        int64_t r = 0;
        for (; r + 4 <= rows.rows; r += 4) {
          add(c, r, sum0);
          add(c, r + 1, sum1);
          add(c, r + 2, sum2);
          add(c, r + 3, sum3);
        }
        for (; r < rows.rows; ++r) add(c, r, sum0);
      }
    });
    const V sum = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
    if (hn::AllTrue(d, hn::Eq(sum, hn::Zero(d)))) return false;
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
