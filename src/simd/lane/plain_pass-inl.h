// SPDX-License-Identifier: Apache-2.0

// The pass over scores of which all are visible and that no option changes but
// the scale: four vectors at a time where that is worth it (ExpAbreast), else
// as any other.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_PLAIN_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_PLAIN_PASS_INL_H_
#undef FA2_SRC_SIMD_LANE_PLAIN_PASS_INL_H_
#else
#define FA2_SRC_SIMD_LANE_PLAIN_PASS_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/lane/score_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class Op>
inline constexpr bool kPassesFour = Op::kPerLane == 1 && kExpsAbreast;

// P of four keys, whose S are at `s` and each `width` further.
template <class D, class V>
HWY_INLINE void FourProbabilities(D d,
                                  const PanelOptions<hn::TFromD<D>>& options,
                                  const hn::TFromD<D>* HWY_RESTRICT s,
                                  size_t width, V shift, V& p0, V& p1, V& p2,
                                  V& p3) {
  const V scale = hn::Set(d, options.scale);
  const V scale_low = hn::Set(d, options.scale_low);
  const auto exponent = [&](size_t key) HWY_ATTR {
    const V score = hn::Load(d, s + key * width);
    return hn::MulAdd(score, scale, hn::MulSub(score, scale_low, shift));
  };
  p0 = exponent(0);
  p1 = exponent(1);
  p2 = exponent(2);
  p3 = exponent(3);
  ExpAbreast<4>(d, p0, p1, p2, p3);
}

// BackwardPass for keys in fours, as tiles have them but the last.
template <class Op, class D, class Scores>
void PlainBackwardPass(D d, const PanelOptions<hn::TFromD<D>>& options,
                       const PassArea& area,
                       const BackwardPanel<hn::TFromD<D>>& panel,
                       const Scores& scores) {
  if constexpr (!kPassesFour<Op>) {
    BackwardPass<Op, false, false>(d, options, area, panel, scores);
  } else {
    using V = hn::Vec<D>;
    const size_t width = PanelWidth(d);
    const size_t index = area.column / width;
    const size_t fours_end = area.key_end - (area.key_end - area.key_begin) % 4;
    for (size_t col = 0; col < area.width; col += hn::Lanes(d)) {
      const V shift = hn::Load(d, panel.lse + col);
      const V delta = hn::Load(d, panel.delta + col);
      for (size_t key = area.key_begin; key < fours_end; key += 4) {
        const size_t raw = (key - panel.first_key) * width + col;
        V p0, p1, p2, p3;
        FourProbabilities(d, options, panel.s + raw, width, shift, p0, p1, p2,
                          p3);
        const auto gradient = [&](V p, size_t row) HWY_ATTR {
          const V grad = hn::Load(d, panel.dp + raw + row * width);
          return hn::Mul(p, hn::Sub(grad, delta));
        };
        const V ds0 = gradient(p0, 0), ds1 = gradient(p1, 1);
        const V ds2 = gradient(p2, 2), ds3 = gradient(p3, 3);
        scores.Store(d, index, key, col, p0, ds0);
        scores.Store(d, index, key + 1, col, p1, ds1);
        scores.Store(d, index, key + 2, col, p2, ds2);
        scores.Store(d, index, key + 3, col, p3, ds3);
      }
    }
    if (fours_end < area.key_end) {
      PassArea rest = area;
      rest.key_begin = fours_end;
      BackwardPass<Op, false, false>(d, options, rest, panel, scores);
    }
  }
}

// ForwardExpPass, for keys in fours too.
template <class Op, class D, class Scores>
void PlainForwardPass(D d, const PanelOptions<hn::TFromD<D>>& options,
                      const PassArea& area, const Scores& scores,
                      const hn::TFromD<D>* HWY_RESTRICT row_max,
                      hn::TFromD<D>* HWY_RESTRICT row_sum,
                      hn::TFromD<D>* HWY_RESTRICT row_weight) {
  if constexpr (!kPassesFour<Op>) {
    ForwardExpPass<Op, false, false>(d, options, area, scores, row_max, row_sum,
                                     row_weight);
  } else {
    using V = hn::Vec<D>;
    const size_t width = PanelWidth(d);
    const size_t fours_end = area.key_end - (area.key_end - area.key_begin) % 4;
    for (size_t col = 0; col < area.width; col += hn::Lanes(d)) {
      const V max = hn::Load(d, row_max + col);
      // As in ForwardExpPass: infinite inputs can leave a column without one.
      const V shift = hn::IfThenZeroElse(hn::Eq(max, hn::Neg(hn::Inf(d))), max);
      V sum = hn::Load(d, row_sum + col);
      for (size_t key = area.key_begin; key < fours_end; key += 4) {
        V p0, p1, p2, p3;
        FourProbabilities(d, options, scores.s() + key * width + col, width,
                          shift, p0, p1, p2, p3);
        scores.Store(d, key, col, p0);
        scores.Store(d, key + 1, col, p1);
        scores.Store(d, key + 2, col, p2);
        scores.Store(d, key + 3, col, p3);
        sum = hn::Add(sum, hn::Add(hn::Add(p0, p1), hn::Add(p2, p3)));
      }
      hn::Store(sum, d, row_sum + col);
    }
    if (fours_end < area.key_end) {
      PassArea rest = area;
      rest.key_begin = fours_end;
      ForwardExpPass<Op, false, false>(d, options, rest, scores, row_max,
                                       row_sum, row_weight);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
