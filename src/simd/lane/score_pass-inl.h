// SPDX-License-Identifier: Apache-2.0

// The fused pass over scores: from S = QK^T (and dP = dO V^T) to P (and dS), a
// group of 16 keys x one panel of queries at a time while both are in cache.
// Lanes are queries: logsumexp, delta and running maxima are row vectors.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_SCORE_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_SCORE_PASS_INL_H_
#undef FA2_SRC_SIMD_LANE_SCORE_PASS_INL_H_
#else
#define FA2_SRC_SIMD_LANE_SCORE_PASS_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/engine.h"
#include "src/simd/lane/pack-inl.h"
#include "src/simd/math/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows [key_begin, key_end) of the panel that begins at column `column` of the
// block and has `width` columns; arrays of scores have rows of W all the same.
struct PassArea {
  size_t key_begin;
  size_t key_end;
  size_t column;
  size_t width;
};

// The part of ScoreOptions that a panel needs, with its pointers resolved.
template <typename T>
struct PanelOptions {
  // scale + scale_low is the scale to twice T's precision: rounded to f32 it
  // would cost scores of 1e3 their fifth digit.
  T scale, scale_low, log2_scale, softcap, inverse_softcap, alibi_slope;
  const T* query_position;
  const T* visible_begin;
  const T* visible_end;
  const uint32_t* visible_bits;  // column 0 of the panel
  size_t visible_bits_stride;
  const T* bias;     // row 0 of the panel
  const T* dropout;  // row 0 of the panel

  PanelOptions(const ScoreOptions& options, const PassArea& area)
      : scale(static_cast<T>(options.scale)),
        scale_low(static_cast<T>(options.scale - static_cast<double>(scale))),
        log2_scale(static_cast<T>(options.scale * kLog2E<double>)),
        softcap(static_cast<T>(options.softcap)),
        inverse_softcap(options.softcap == 0.0
                            ? T(0)
                            : static_cast<T>(1.0 / options.softcap)),
        alibi_slope(static_cast<T>(options.alibi_slope)),
        query_position(At(options.query_position, area.column)),
        visible_begin(At(options.visible_begin, area.column)),
        visible_end(At(options.visible_end, area.column)),
        visible_bits(options.visible_bits == nullptr
                         ? nullptr
                         : options.visible_bits + area.column),
        visible_bits_stride(static_cast<size_t>(options.visible_bits_stride)),
        bias(At(options.bias,
                area.column * static_cast<size_t>(options.staged_key_rows))),
        dropout(
            At(options.dropout,
               area.column * static_cast<size_t>(options.staged_key_rows))) {}

  static const T* At(const void* array, size_t offset) {
    return array == nullptr ? nullptr : static_cast<const T*>(array) + offset;
  }
};

// One vector of S through scale, softcap, bias and ALiBi, at row `key` and
// column `col` of the panel, with what the backward pass needs on the way back:
// the slope of the softcap and the ALiBi distance. `visible` loses what a bias
// of -inf masks.
template <class D>
HWY_INLINE void GeneralScore(D d, const PanelOptions<hn::TFromD<D>>& options,
                             size_t key, size_t col, size_t width,
                             hn::Vec<D>& score, hn::Vec<D>& softcap_slope,
                             hn::Vec<D>& distance, hn::Mask<D>& visible) {
  using T = hn::TFromD<D>;
  score = hn::MulAdd(score, hn::Set(d, options.scale),
                     hn::Mul(score, hn::Set(d, options.scale_low)));
  softcap_slope = hn::Set(d, T(1));
  if (options.softcap != T(0)) {
    const auto t = Tanh(d, hn::Mul(score, hn::Set(d, options.inverse_softcap)));
    score = hn::Mul(t, hn::Set(d, options.softcap));
    softcap_slope = hn::NegMulAdd(t, t, softcap_slope);
  }
  if (options.bias != nullptr) {
    const auto bias = hn::Load(d, options.bias + key * width + col);
    score = hn::Add(score, bias);
    // Not(Eq): Ne is false of NaN on x86, which would mask it.
    visible = hn::And(visible, hn::Not(hn::Eq(bias, hn::Neg(hn::Inf(d)))));
  }
  distance = hn::Zero(d);
  if (options.query_position != nullptr) {
    distance = hn::Abs(hn::Sub(hn::Load(d, options.query_position + col),
                               hn::Set(d, static_cast<T>(key))));
    score = hn::NegMulAdd(hn::Set(d, options.alibi_slope), distance, score);
  }
}

template <class D>
HWY_INLINE hn::Mask<D> AllLanes(D d) {
  return hn::Eq(hn::Zero(d), hn::Zero(d));
}

template <class D>
HWY_INLINE hn::Mask<D> VisibleLanes(D d,
                                    const PanelOptions<hn::TFromD<D>>& options,
                                    size_t key, size_t col) {
  const auto k = hn::Set(d, static_cast<hn::TFromD<D>>(key));
  const auto visible =
      hn::And(hn::Le(hn::Load(d, options.visible_begin + col), k),
              hn::Lt(k, hn::Load(d, options.visible_end + col)));
  if (options.visible_bits == nullptr) return visible;
  const hn::RebindToUnsigned<D> du;
  const auto words = hn::LoadU(
      hn::Rebind<uint32_t, D>(),
      options.visible_bits + key / 32 * options.visible_bits_stride + col);
  const auto bit = hn::Set(du, hn::TFromD<decltype(du)>{1} << (key % 32));
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    return hn::And(visible, hn::RebindMask(d, hn::TestBit(words, bit)));
  } else {
    return hn::And(
        visible, hn::RebindMask(d, hn::TestBit(hn::PromoteTo(du, words), bit)));
  }
}

// Whether any of a panel's row statistics, maxima or logsumexps, is that large
// and finite.
template <class D>
HWY_INLINE bool HasLargeScores(D d,
                               const hn::TFromD<D>* HWY_RESTRICT statistics,
                               size_t width) {
  using T = hn::TFromD<D>;
  auto large = hn::Not(AllLanes(d));
  for (size_t col = 0; col < width; col += hn::Lanes(d)) {
    const auto size = hn::Abs(hn::Load(d, statistics + col));
    large = hn::Or(large, hn::And(hn::Gt(size, hn::Set(d, T(kLargeScore))),
                                  hn::Lt(size, hn::Inf(d))));
  }
  return !hn::AllFalse(d, large);
}

// What Probability takes as `shift` for a logsumexp or a maximum.
template <int kExpDegree, bool kScaled, class D>
HWY_INLINE hn::Vec<D> Shift(D d, hn::Vec<D> x) {
  if constexpr (kExpDegree != 0 && !kScaled) {
    x = hn::MulAdd(x, hn::Set(d, kLog2E<hn::TFromD<D>>),
                   hn::Set(d, RoughExp2Polynomial<kExpDegree>::kOrigin));
  }
  return x;
}

// exp(S - shift), with kScaled from scores that are scaled already. With
// kMasked raw scores may be -inf. kExpDegree: see MultiplyAdd.
template <int kExpDegree, bool kMasked, bool kScaled, class From = Held,
          class D>
HWY_INLINE hn::Vec<D> Probability(D d,
                                  const PanelOptions<hn::TFromD<D>>& options,
                                  hn::Vec<D> score, hn::Vec<D> shift) {
  using T = hn::TFromD<D>;
  if constexpr (kExpDegree != 0 && kScaled) {
    // A bias of -3e38, which hides a key, times log2(e) would be infinite, and
    // all keys of a row may have it.
    return RoughExp2<kExpDegree, From>(
        d, hn::MulSub(hn::Sub(score, shift), hn::Set(d, kLog2E<T>),
                      hn::Set(d, RoughExp2Polynomial<kExpDegree>::kOrigin)));
  } else if constexpr (kExpDegree != 0) {
    const T* const factor = From::At(&options.log2_scale);
    return RoughExp2<kExpDegree, From>(
        d, hn::MulSub(score, hn::Set(d, *factor), shift));
  } else if constexpr (kScaled) {
    return Exp(d, hn::Sub(score, shift));
  } else {
    // -inf times a scale_low of 0 would be NaN. (S scale - shift) rounds once
    // before log2(e) magnifies: with lse of 1e4 the other order would cost four
    // digits.
    const auto finite =
        kMasked ? hn::Max(score, hn::Set(d, hwy::LowestValue<T>())) : score;
    const auto low = hn::MulSub(finite, hn::Set(d, options.scale_low), shift);
    return Exp(d, hn::MulAdd(score, hn::Set(d, options.scale), low));
  }
}

// The arrays of a panel in the backward pass, and what every vector of it
// takes.
template <typename T>
struct BackwardPanel {
  size_t first_key;  // of s and dp
  const T* lse;
  const T* delta;
  const T* s;
  const T* dp;
  T* ds;  // staged, or nullptr
  double* alibi_gradient;
};

// P (dropout applied) and dS (before the scale of Q and K) of one vector.
// Masked elements become 0 by selection after the arithmetic, so a NaN in a key
// that a query does not see goes nowhere.
template <class Op, bool kMasked, bool kGeneral, class D>
HWY_INLINE void Fuse(D d, const PanelOptions<hn::TFromD<D>>& options,
                     const BackwardPanel<hn::TFromD<D>>& panel, size_t width,
                     size_t key, size_t col, hn::Vec<D> shift, hn::Vec<D> delta,
                     hn::Vec<D>& alibi_sum, hn::Vec<D>& p, hn::Vec<D>& ds) {
  using V = hn::Vec<D>;
  const size_t at = key * width + col;
  const size_t raw = at - panel.first_key * width;
  V score = hn::Load(d, panel.s + raw);
  V grad = hn::Load(d, panel.dp + raw);
  if constexpr (!kGeneral) {
    p = Probability<Op::kExpDegree, false, false>(d, options, score, shift);
    ds = hn::Mul(p, hn::Sub(grad, delta));
    if constexpr (kMasked) {
      const auto visible = VisibleLanes(d, options, key, col);
      p = hn::IfThenElseZero(visible, p);
      ds = hn::IfThenElseZero(visible, ds);
    }
  } else {
    V slope, distance;
    auto visible = kMasked ? VisibleLanes(d, options, key, col) : AllLanes(d);
    GeneralScore(d, options, key, col, width, score, slope, distance, visible);
    p = hn::IfThenElseZero(visible, Probability<Op::kExpDegree, false, true>(
                                        d, options, score, shift));
    V dropped = p;
    if (options.dropout != nullptr) {
      const V z = hn::Load(d, options.dropout + at);
      grad = hn::Mul(grad, z);
      dropped = hn::Mul(p, z);
    }
    ds = hn::IfThenElseZero(visible, hn::Mul(p, hn::Sub(grad, delta)));
    if (panel.ds != nullptr) hn::Store(ds, d, panel.ds + at);
    alibi_sum = hn::NegMulAdd(ds, distance, alibi_sum);
    ds = hn::IfThenElseZero(visible, hn::Mul(ds, slope));
    p = dropped;
  }
}

// Backward: from S and dP to P and dS, which `scores` stores, for keys in pairs
// where a lane of the operands holds a pair. Arguments by value, here and in
// ForwardExpPass, since the compiler reloads what is behind a reference after
// each store (bf16 on Zen 5: 100 instructions for four vectors instead of 75).
template <class Op, bool kMasked, bool kGeneral, class D, class Scores>
void BackwardPass(D d, const PanelOptions<hn::TFromD<D>> options,
                  const PassArea area, const BackwardPanel<hn::TFromD<D>> panel,
                  const Scores scores) {
  using V = hn::Vec<D>;
  const size_t lanes = hn::Lanes(d);
  const size_t width = PanelWidth(d);
  const size_t index = area.column / width;
  V alibi_sum = hn::Zero(d);
  const auto shift_of = [&](size_t col) HWY_ATTR {
    return Shift<Op::kExpDegree, kGeneral>(d, hn::Load(d, panel.lse + col));
  };
  if constexpr (Op::kPerLane == 1) {
    for (size_t col = 0; col < area.width; col += lanes) {
      const V shift = shift_of(col);
      const V delta = hn::Load(d, panel.delta + col);
      for (size_t key = area.key_begin; key < area.key_end; ++key) {
        V p, ds;
        Fuse<Op, kMasked, kGeneral>(d, options, panel, width, key, col, shift,
                                    delta, alibi_sum, p, ds);
        scores.Store(d, index, key, col, p, ds);
      }
    }
  } else {
    for (size_t col = 0; col < area.width; col += 2 * lanes) {
      const V shift0 = shift_of(col);
      const V shift1 = shift_of(col + lanes);
      const V delta0 = hn::Load(d, panel.delta + col);
      const V delta1 = hn::Load(d, panel.delta + col + lanes);
      for (size_t key = area.key_begin; key < area.key_end; key += 2) {
        V p00, p01, p10, p11, ds00, ds01, ds10, ds11;
        Fuse<Op, kMasked, kGeneral>(d, options, panel, width, key, col, shift0,
                                    delta0, alibi_sum, p00, ds00);
        Fuse<Op, kMasked, kGeneral>(d, options, panel, width, key, col + lanes,
                                    shift1, delta1, alibi_sum, p01, ds01);
        Fuse<Op, kMasked, kGeneral>(d, options, panel, width, key + 1, col,
                                    shift0, delta0, alibi_sum, p10, ds10);
        Fuse<Op, kMasked, kGeneral>(d, options, panel, width, key + 1,
                                    col + lanes, shift1, delta1, alibi_sum, p11,
                                    ds11);
        scores.Store(d, index, key, col, p00, p01, p10, p11, ds00, ds01, ds10,
                     ds11);
      }
    }
  }
  if (kGeneral && panel.alibi_gradient != nullptr) {
    *panel.alibi_gradient +=
        static_cast<double>(hn::GetLane(hn::SumOfLanes(d, alibi_sum)));
  }
}

// Forward, first part: updates the running maxima of the panel's columns. With
// kGeneral the scores are rewritten as they enter the softmax; without, they
// stay raw (unscaled) and only masked ones become -inf, which a positive scale
// keeps.
template <bool kMasked, bool kGeneral, class D>
void ForwardMaxPass(D d, const PanelOptions<hn::TFromD<D>>& options,
                    const PassArea& area, hn::TFromD<D>* HWY_RESTRICT s,
                    hn::TFromD<D>* HWY_RESTRICT row_max) {
  using V = hn::Vec<D>;
  const size_t lanes = hn::Lanes(d);
  const V hidden = hn::Neg(hn::Inf(d));
  for (size_t col = 0; col < area.width; col += lanes) {
    const auto score_of = [&](size_t key) HWY_ATTR {
      const size_t at = key * PanelWidth(d) + col;
      V score = hn::Load(d, s + at);
      if constexpr (kGeneral || kMasked) {
        auto visible =
            kMasked ? VisibleLanes(d, options, key, col) : AllLanes(d);
        if constexpr (kGeneral) {
          V slope, distance;
          GeneralScore(d, options, key, col, PanelWidth(d), score, slope,
                       distance, visible);
        }
        score = hn::IfThenElse(visible, score, hidden);
        hn::Store(score, d, s + at);
      }
      return score;
    };
    // Two chains: a maximum takes four cycles.
    V greatest = hidden;
    V other = hidden;
    size_t key = area.key_begin;
    for (; key + 2 <= area.key_end; key += 2) {
      greatest = hn::Max(greatest, score_of(key));
      other = hn::Max(other, score_of(key + 1));
    }
    if (key < area.key_end) greatest = hn::Max(greatest, score_of(key));
    greatest = hn::Max(greatest, other);
    if constexpr (!kGeneral) {
      greatest = hn::Mul(greatest, hn::Set(d, options.scale));
    }
    hn::Store(hn::Max(hn::Load(d, row_max + col), greatest), d, row_max + col);
  }
}

// Forward, second part: from S to P = exp(S - max) (dropout applied), which
// `scores` stores; the sums of P without dropout are added to row_sum, those of
// P as the products take it to row_weight, unless that is nullptr. With
// kGeneral the scores are scaled already.
template <class Op, bool kGeneral, bool kMasked, class D, class Scores>
void ForwardExpPass(D d, const PanelOptions<hn::TFromD<D>> options,
                    const PassArea area, const Scores scores,
                    const hn::TFromD<D>* HWY_RESTRICT row_max,
                    hn::TFromD<D>* HWY_RESTRICT row_sum,
                    hn::TFromD<D>* HWY_RESTRICT row_weight) {
  using V = hn::Vec<D>;
  const size_t lanes = hn::Lanes(d);
  const auto add_to = [&](hn::TFromD<D>* to, V sum) HWY_ATTR {
    hn::Store(hn::Add(hn::Load(d, to), sum), d, to);
  };
  for (size_t col = 0; col < area.width; col += lanes) {
    const V max = hn::Load(d, row_max + col);
    // A column that has seen no key: exp(-inf - 0) is 0, exp(-inf + inf) NaN.
    const V shift = Shift<Op::kForwardExpDegree, kGeneral>(
        d, hn::IfThenZeroElse(hn::Eq(max, hn::Neg(hn::Inf(d))), max));
    V sum = hn::Zero(d);
    const auto probability = [&](size_t key) HWY_ATTR {
      const size_t at = key * PanelWidth(d) + col;
      const V p = Probability<Op::kForwardExpDegree, kMasked, kGeneral>(
          d, options, hn::Load(d, scores.s() + at), shift);
      sum = hn::Add(sum, p);
      return options.dropout == nullptr
                 ? p
                 : hn::Mul(p, hn::Load(d, options.dropout + at));
    };
    if constexpr (Op::kPerLane == 1) {
      for (size_t key = area.key_begin; key < area.key_end; ++key) {
        scores.Store(d, key, col, probability(key));
      }
    } else {
      V weight = hn::Zero(d);
      for (size_t key = area.key_begin; key < area.key_end; key += 2) {
        const V even = probability(key);
        const V odd = probability(key + 1);
        scores.Store(d, key, col, even, odd, weight);
      }
      if (row_weight != nullptr) add_to(row_weight + col, weight);
    }
    add_to(row_sum + col, sum);
  }
}

// exp(old maximum - new maximum), by which what was summed so far shrinks.
// Rescales row_sum.
template <class D>
void ForwardRescale(D d, size_t width,
                    const hn::TFromD<D>* HWY_RESTRICT old_max,
                    const hn::TFromD<D>* HWY_RESTRICT new_max,
                    hn::TFromD<D>* HWY_RESTRICT row_sum,
                    hn::TFromD<D>* HWY_RESTRICT factor) {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  const V hidden = hn::Neg(hn::Inf(d));
  for (size_t col = 0; col < width; col += hn::Lanes(d)) {
    const V before = hn::Load(d, old_max + col);
    const V after = hn::Load(d, new_max + col);
    const auto same = hn::Eq(before, after);
    const V shift = hn::IfThenZeroElse(hn::Eq(after, hidden), after);
    const V scaled = Exp(d, hn::Sub(before, shift));
    const V f = hn::IfThenElse(same, hn::Set(d, T(1)), scaled);
    hn::Store(f, d, factor + col);
    hn::Store(hn::Mul(f, hn::Load(d, row_sum + col)), d, row_sum + col);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
