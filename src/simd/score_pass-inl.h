// The fused pass over scores: from S = QK^T (and dP = dO V^T) to P (and dS), a
// group of 16 keys x one panel of queries at a time while both are in cache.
// Lanes are queries: logsumexp, delta and running maxima are row vectors.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_SCORE_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_SCORE_PASS_INL_H_
#undef FA2_SRC_SIMD_SCORE_PASS_INL_H_
#else
#define FA2_SRC_SIMD_SCORE_PASS_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/engine.h"
#include "src/simd/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows [key_begin, key_end) of one panel of columns [column, column + width).
struct PassArea {
  size_t key_begin;
  size_t key_end;
  size_t column;  // of the block
  size_t width;   // whole vectors
};

// The part of ScoreOptions that a panel needs, with its pointers resolved.
template <typename T>
struct PanelOptions {
  // scale + scale_low is the scale to twice T's precision: rounded to f32 it
  // would cost scores of 1e3 their fifth digit.
  T scale, scale_low, softcap, inverse_softcap, alibi_slope;
  const T* query_position;
  const T* visible_begin;
  const T* visible_end;
  const T* bias;     // row 0 of the panel
  const T* dropout;  // row 0 of the panel

  PanelOptions(const ScoreOptions& options, const PassArea& area)
      : scale(static_cast<T>(options.scale)),
        scale_low(static_cast<T>(options.scale - static_cast<double>(scale))),
        softcap(static_cast<T>(options.softcap)),
        inverse_softcap(options.softcap == 0.0
                            ? T(0)
                            : static_cast<T>(1.0 / options.softcap)),
        alibi_slope(static_cast<T>(options.alibi_slope)),
        query_position(At(options.query_position, area.column)),
        visible_begin(At(options.visible_begin, area.column)),
        visible_end(At(options.visible_end, area.column)),
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
  return hn::And(hn::Le(hn::Load(d, options.visible_begin + col), k),
                 hn::Lt(k, hn::Load(d, options.visible_end + col)));
}

// Backward: S becomes P (dropout applied) in `s`, dP becomes dS (before the
// scale of Q and K) in `dp`. `s` and `dp` are rows 0 of the panel. Masked
// elements become 0 by selection after the arithmetic, so a NaN in a key that
// a query does not see goes nowhere.
template <bool kMasked, bool kGeneral, class D>
void BackwardPass(D d, const PanelOptions<hn::TFromD<D>>& options,
                  const PassArea& area, const hn::TFromD<D>* HWY_RESTRICT lse,
                  const hn::TFromD<D>* HWY_RESTRICT delta,
                  hn::TFromD<D>* HWY_RESTRICT s, hn::TFromD<D>* HWY_RESTRICT dp,
                  hn::TFromD<D>* HWY_RESTRICT ds_out,
                  double* HWY_RESTRICT alibi_gradient) {
  using V = hn::Vec<D>;
  const size_t lanes = hn::Lanes(d);
  const V scale = hn::Set(d, options.scale);
  const V scale_low = hn::Set(d, options.scale_low);
  V alibi_sum = hn::Zero(d);
  for (size_t key = area.key_begin; key < area.key_end; ++key) {
    for (size_t col = 0; col < area.width; col += lanes) {
      const size_t at = key * area.width + col;
      const V row_lse = hn::Load(d, lse + col);
      const V row_delta = hn::Load(d, delta + col);
      V score = hn::Load(d, s + at);
      V grad = hn::Load(d, dp + at);
      if constexpr (!kGeneral) {
        // (S scale - lse) rounds once before log2(e) magnifies: with lse of
        // 1e4 the other order would cost four digits.
        const V low = hn::MulSub(score, scale_low, row_lse);
        V p = Exp(d, hn::MulAdd(score, scale, low));
        V ds = hn::Mul(p, hn::Sub(grad, row_delta));
        if constexpr (kMasked) {
          const auto visible = VisibleLanes(d, options, key, col);
          p = hn::IfThenElseZero(visible, p);
          ds = hn::IfThenElseZero(visible, ds);
        }
        hn::Store(p, d, s + at);
        hn::Store(ds, d, dp + at);
      } else {
        V slope, distance;
        auto visible =
            kMasked ? VisibleLanes(d, options, key, col) : AllLanes(d);
        GeneralScore(d, options, key, col, area.width, score, slope, distance,
                     visible);
        V p = Exp(d, hn::Sub(score, row_lse));
        p = hn::IfThenElseZero(visible, p);
        V dropped = p;
        if (options.dropout != nullptr) {
          const V z = hn::Load(d, options.dropout + at);
          grad = hn::Mul(grad, z);
          dropped = hn::Mul(p, z);
        }
        V ds =
            hn::IfThenElseZero(visible, hn::Mul(p, hn::Sub(grad, row_delta)));
        if (ds_out != nullptr) hn::Store(ds, d, ds_out + at);
        alibi_sum = hn::NegMulAdd(ds, distance, alibi_sum);
        ds = hn::IfThenElseZero(visible, hn::Mul(ds, slope));
        hn::Store(dropped, d, s + at);
        hn::Store(ds, d, dp + at);
      }
    }
  }
  if (kGeneral && alibi_gradient != nullptr) {
    *alibi_gradient +=
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
      const size_t at = key * area.width + col;
      V score = hn::Load(d, s + at);
      if constexpr (kGeneral || kMasked) {
        auto visible =
            kMasked ? VisibleLanes(d, options, key, col) : AllLanes(d);
        if constexpr (kGeneral) {
          V slope, distance;
          GeneralScore(d, options, key, col, area.width, score, slope, distance,
                       visible);
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

// Forward, second part: S becomes P = exp(S - max) (dropout applied); the sums
// of P without dropout are added to row_sum. With kGeneral the scores are
// scaled already.
template <bool kGeneral, bool kMasked, class D>
void ForwardExpPass(D d, const PanelOptions<hn::TFromD<D>>& options,
                    const PassArea& area, hn::TFromD<D>* HWY_RESTRICT s,
                    const hn::TFromD<D>* HWY_RESTRICT row_max,
                    hn::TFromD<D>* HWY_RESTRICT row_sum) {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  const size_t lanes = hn::Lanes(d);
  const V scale = hn::Set(d, options.scale);
  const V scale_low = hn::Set(d, options.scale_low);
  const V lowest = hn::Set(d, hwy::LowestValue<T>());
  for (size_t col = 0; col < area.width; col += lanes) {
    const V max = hn::Load(d, row_max + col);
    // A column that has seen no key: exp(-inf - 0) is 0, exp(-inf + inf) NaN.
    const V shift = hn::IfThenZeroElse(hn::Eq(max, hn::Neg(hn::Inf(d))), max);
    V sum = hn::Zero(d);
    for (size_t key = area.key_begin; key < area.key_end; ++key) {
      const size_t at = key * area.width + col;
      const V score = hn::Load(d, s + at);
      V shifted = hn::Sub(score, shift);
      if constexpr (!kGeneral) {
        // -inf times a scale_low of 0 would be NaN.
        const V finite = kMasked ? hn::Max(score, lowest) : score;
        shifted =
            hn::MulAdd(score, scale, hn::MulSub(finite, scale_low, shift));
      }
      V p = Exp(d, shifted);
      sum = hn::Add(sum, p);
      if (options.dropout != nullptr) {
        p = hn::Mul(p, hn::Load(d, options.dropout + at));
      }
      hn::Store(p, d, s + at);
    }
    hn::Store(hn::Add(hn::Load(d, row_sum + col), sum), d, row_sum + col);
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
