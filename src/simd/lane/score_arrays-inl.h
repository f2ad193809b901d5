// SPDX-License-Identifier: Apache-2.0

// Where a block's scores lie: S and dP, which the fused pass turns into P and
// dS, and these as operands of the products that follow.
//
// Here the operands are the pass's own arrays: one element a lane.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_SCORE_ARRAYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_SCORE_ARRAYS_INL_H_
#undef FA2_SRC_SIMD_LANE_SCORE_ARRAYS_INL_H_
#else
#define FA2_SRC_SIMD_LANE_SCORE_ARRAYS_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/lane/pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// An operand has `terms` arrays of equal layout whose sum is meant; only P can
// have more than one. All take `width` columns, PanelWidth(d), a panel.
template <class Op>
class BackwardScores {
 public:
  using T = typename Op::Sum;
  using Element = typename Op::Element;

  BackwardScores(void* scratch, size_t width, size_t keys, size_t queries)
      : panel_(keys * width),
        s_(static_cast<T*>(scratch)),
        dp_(s_ + keys * queries) {}

  static size_t Bytes(size_t /*width*/, size_t keys, size_t queries) {
    return 2 * keys * queries * sizeof(T);
  }

  // Keys of a panel that S and dP hold at once, of the block's `keys`;
  // right_bytes: a panel of Q and one of dO.
  static size_t StripKeys(size_t keys, size_t /*right_bytes*/) { return keys; }

  // S and dP of a strip of a panel, [key][W]. Valid until those of the
  // next panel are taken.
  T* s(size_t panel) const { return s_ + panel * panel_; }
  T* dp(size_t panel) const { return dp_ + panel * panel_; }

  // P and dS of a vector: row `key`, columns from `col` on.
  template <class D>
  HWY_INLINE void Store(D d, size_t panel, size_t key, size_t col, hn::Vec<D> p,
                        hn::Vec<D> ds) const {
    const size_t at = panel * panel_ + key * PanelWidth(d) + col;
    hn::Store(p, d, s_ + at);
    hn::Store(ds, d, dp_ + at);
  }

  // Zeros for the keys [begin, end).
  template <class D>
  void Clear(D d, size_t panel, size_t begin, size_t end) const {
    const size_t at = panel * panel_ + begin * PanelWidth(d);
    const size_t count = (end - begin) * PanelWidth(d);
    std::fill_n(s_ + at, count, T(0));
    std::fill_n(dp_ + at, count, T(0));
  }

  // Left operands of dV and dK: [panel][key][Steps(W)].
  const Element* p(size_t /*term*/) const { return s_; }
  const Element* ds() const { return dp_; }
  // Right operand of a panel of dQ^T, [Steps(key)][W], valid as long as S.
  const Element* ds_right(size_t panel) const { return dp(panel); }

 private:
  size_t panel_;
  T *s_, *dp_;
};

template <class Op>
class ForwardScores {
 public:
  using T = typename Op::Sum;
  using Element = typename Op::Element;

  ForwardScores(void* scratch, size_t /*width*/, size_t /*keys*/)
      : s_(static_cast<T*>(scratch)) {}

  static size_t Bytes(size_t width, size_t keys) {
    return keys * width * sizeof(T);
  }

  // S of one panel, [key][W].
  T* s() const { return s_; }

  // P of a vector: row `key`, columns from `col` on.
  template <class D>
  HWY_INLINE void Store(D d, size_t key, size_t col, hn::Vec<D> p) const {
    hn::Store(p, d, s_ + key * PanelWidth(d) + col);
  }

  // Right operand of a panel of O^T, [Steps(key)][W].
  const Element* p(size_t /*term*/) const { return s_; }

 private:
  T* s_;
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
