// SPDX-License-Identifier: Apache-2.0

// Rows of keys or queries as rows of the accumulator's type.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_DIRECT_WIDEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_DIRECT_WIDEN_INL_H_
#undef FA2_SRC_SIMD_DIRECT_WIDEN_INL_H_
#else
#define FA2_SRC_SIMD_DIRECT_WIDEN_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "src/simd/direct/direct.h"
#include "src/simd/math/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
struct DirectWiden {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;

  static T* At(const DirectRows& rows, int64_t r, size_t c) {
    return static_cast<T*>(rows.data) + r * rows.stride + c;
  }

  // Calls body(vector, row, column) for the widened vectors of rows, and with
  // zeros for those behind them up to `columns`.
  template <class Stored, class Body>
  static HWY_INLINE void ForWideVectors(Stored tag, const Rows& rows,
                                        int64_t columns, const Body& body) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t depth = static_cast<size_t>(rows.depth);
    for (int64_t r = 0; r < rows.rows; ++r) {
      const auto* in = static_cast<const typename Stored::Type*>(rows.data) +
                       r * rows.stride;
      size_t c = 0;
      // One loop, with the tail in it: GCC makes a loop of whole vectors, where
      // it copies, a call of memcpy or `rep movs`, slower for so few.
      for (; c < depth; c += lanes) {
        body(depth - c < lanes ? LoadWideTail(d, tag, in + c, depth - c)
                               : LoadWide(d, tag, in + c),
             r, c);
      }
      for (; c < static_cast<size_t>(columns); c += lanes) {
        body(hn::Zero(d), r, c);
      }
    }
  }

  // Zeros behind the rows up to out's stride.
  template <class Stored>
  static HWY_INLINE void WidenRows(Stored tag, const Rows& rows,
                                   const DirectRows& out) {
    ForWideVectors(tag, rows, out.stride,
                   [&](V v, int64_t r, size_t c)
                       HWY_ATTR { hn::Store(v, D(), At(out, r, c)); });
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
