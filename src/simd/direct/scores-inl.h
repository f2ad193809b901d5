// SPDX-License-Identifier: Apache-2.0

// From products to probabilities and dS, row by row, the keys of a run along
// the lanes. Rows that see all and have no options go a shorter way.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_DIRECT_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_DIRECT_SCORES_INL_H_
#undef FA2_SRC_SIMD_DIRECT_SCORES_INL_H_
#else
#define FA2_SRC_SIMD_DIRECT_SCORES_INL_H_
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"
#include "src/simd/direct/direct.h"
#include "src/simd/math/exp-inl.h"
#include "src/simd/math/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
struct DirectScorePass {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  using M = hn::Mask<D>;

  static constexpr T kHidden = -std::numeric_limits<T>::infinity();

  static HWY_INLINE T* Row(const DirectRows& rows, int64_t r) {
    return static_cast<T*>(rows.data) + r * rows.stride;
  }

  // A row of bias, or of a mask as 0 and -inf.
  static void ReadBias(const ScoreMatrix& bias, size_t keys, T* row) {
    if (bias.dtype == DType::kBool) {
      const auto* shows = static_cast<const uint8_t*>(bias.data);
      for (size_t k = 0; k < keys; ++k) {
        row[k] = shows[static_cast<int64_t>(k) * bias.key_stride] != 0
                     ? T(0)
                     : kHidden;
      }
      return;
    }
    WithAnyStored(bias.dtype, [&](auto tag) HWY_ATTR {
      using Stored = decltype(tag);
      const D d;
      const hn::CappedTag<T, 1> d1;
      const size_t lanes = hn::Lanes(d);
      const auto* in = static_cast<const typename Stored::Type*>(bias.data);
      size_t k = 0;
      if (bias.key_stride == 1) {
        for (; k + lanes <= keys; k += lanes) {
          hn::Store(LoadWide(d, tag, in + k), d, row + k);
        }
      }
      for (; k < keys; ++k) {
        const auto* one = in + static_cast<int64_t>(k) * bias.key_stride;
        row[k] = hn::GetLane(LoadWide(d1, tag, one));
      }
    });
  }

  // What every vector of a row takes.
  struct RowScores {
    RowScores(const DirectScores& scores, const DirectView& seen)
        : scale(static_cast<T>(scores.scale)),
          scale_low(static_cast<T>(scores.scale - static_cast<double>(scale))),
          softcap(static_cast<T>(scores.softcap)),
          inverse_softcap(scores.softcap == 0.0
                              ? T(0)
                              : static_cast<T>(1.0 / scores.softcap)),
          slope(static_cast<T>(seen.alibi_slope)),
          position(static_cast<T>(seen.position)),
          begin(static_cast<T>(seen.keys.begin)),
          end(static_cast<T>(seen.keys.end)),
          biased(seen.bias.data != nullptr) {
      if (biased) {
        ReadBias(seen.bias, static_cast<size_t>(scores.keys), bias);
      }
    }

    // The scores of products at key k, and which of them the row sees;
    // `softcap_slope` is what the softcap multiplies dS with.
    HWY_INLINE V At(D d, V product, size_t k, M& visible,
                    V& softcap_slope) const {
      const V key = hn::Iota(d, static_cast<T>(k));
      visible =
          hn::And(hn::Le(hn::Set(d, begin), key), hn::Lt(key, hn::Set(d, end)));
      V score = hn::MulAdd(product, hn::Set(d, scale),
                           hn::Mul(product, hn::Set(d, scale_low)));
      if (softcap != T(0)) {
        const V t = Tanh(d, hn::Mul(score, hn::Set(d, inverse_softcap)));
        score = hn::Mul(t, hn::Set(d, softcap));
        softcap_slope = hn::NegMulAdd(t, t, hn::Set(d, T(1)));
      }
      if (biased) {
        const V add = hn::Load(d, bias + k);
        score = hn::Add(score, add);
        // Not(Eq): Ne is false of NaN on x86, which would hide it.
        visible = hn::And(visible, hn::Not(hn::Eq(add, hn::Set(d, kHidden))));
      }
      if (slope != T(0)) {
        score =
            hn::NegMulAdd(hn::Set(d, slope),
                          hn::Abs(hn::Sub(hn::Set(d, position), key)), score);
      }
      return score;
    }

    T scale, scale_low, softcap, inverse_softcap, slope, position, begin, end;
    bool biased;
    HWY_ALIGN T bias[kDirectKeys];
  };

  // Multiplies with whether dropout keeps a key, times `scale`.
  static void Keep(const uint8_t* keep, size_t keys, T scale, T* row) {
    for (size_t k = 0; k < keys; ++k) row[k] *= keep[k] != 0 ? scale : T(0);
  }

  // Whether a row sees all keys of the run, whole vectors of them, and no
  // option changes its scores but the scale.
  static bool IsPlain(const DirectScores& scores, const DirectView& seen) {
    return seen.bias.data == nullptr && seen.alibi_slope == 0.0 &&
           scores.softcap == 0.0 && scores.scale > 0.0 &&
           seen.keys.begin == 0 && seen.keys.end == scores.keys &&
           static_cast<size_t>(scores.keys) % hn::Lanes(D()) == 0;
  }

  // The scale, and exp(scores - shift) from products. The difference rounds
  // once.
  struct PlainScale {
    explicit PlainScale(double factor)
        : scale(static_cast<T>(factor)),
          low(static_cast<T>(factor - static_cast<double>(scale))) {}

    HWY_INLINE V Score(D d, V product) const {
      return hn::MulAdd(product, hn::Set(d, scale),
                        hn::Mul(product, hn::Set(d, low)));
    }
    HWY_INLINE V Probability(D d, V product, V shift) const {
      return Exp(d, hn::MulAdd(product, hn::Set(d, scale),
                               hn::MulSub(product, hn::Set(d, low), shift)));
    }

    T scale, low;
  };

  // The greatest score of a plain row, that of the greatest product, or
  // `before` where no score is greater: lanes need not be compared with each
  // other then (7 queries of 4,096 keys on AVX-512: 0.96 of the time).
  static HWY_INLINE T PlainMax(const DirectScores& scores, const T* p,
                               T before) {
    const D d;
    V most = hn::Set(d, kHidden);
    for (size_t k = 0; k < static_cast<size_t>(scores.keys);
         k += hn::Lanes(d)) {
      most = hn::Max(hn::Load(d, p + k), most);
    }
    const PlainScale scale(scores.scale);
    const V seen = scale.Score(d, most);
    if (hn::AllTrue(d, hn::Le(seen, hn::Set(d, before)))) return before;
    return hn::GetLane(scale.Score(d, hn::MaxOfLanes(d, most)));
  }

  // From products to scores, kHidden where the row sees none; their maximum.
  static T ScoreRow(const DirectScores& scores, int64_t r, T* p) {
    const D d;
    const RowScores row(scores, scores.views[r]);
    V most = hn::Set(d, kHidden);
    for (size_t k = 0; k < static_cast<size_t>(scores.keys);
         k += hn::Lanes(d)) {
      M visible;
      V unused;
      const V score = row.At(d, hn::Load(d, p + k), k, visible, unused);
      const V seen = hn::IfThenElse(visible, score, hn::Set(d, kHidden));
      // In this order a NaN does not count on x86; where it does, the row is
      // NaN all the same.
      most = hn::Max(seen, most);
      hn::Store(seen, d, p + k);
    }
    return hn::GetLane(hn::MaxOfLanes(d, most));
  }

  // Replaces the vectors of a row by what body makes of them; their sum.
  template <class Body>
  static HWY_INLINE T ReplaceRow(const DirectScores& scores, T* p,
                                 const Body& body) {
    const D d;
    V sum = hn::Zero(d);
    for (size_t k = 0; k < static_cast<size_t>(scores.keys);
         k += hn::Lanes(d)) {
      const V x = body(hn::Load(d, p + k));
      sum = hn::Add(sum, x);
      hn::Store(x, d, p + k);
    }
    return hn::GetLane(hn::SumOfLanes(d, sum));
  }

  static void ForwardRow(const DirectScores& scores, int64_t r, T* row_max,
                         T* row_sum, const DirectRows& out) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t keys = static_cast<size_t>(scores.keys);
    T* const p = Row(scores.products, r);
    const T before = row_max[r];
    T most = kHidden;
    if (IsPlain(scores, scores.views[r])) most = PlainMax(scores, p, before);
    // An infinite maximum, or NaN, may be all that is left of many scores.
    const bool plain = std::abs(most) < -kHidden;
    if (!plain) most = ScoreRow(scores, r, p);
    // A NaN is no maximum.
    const T max = most > before ? most : before;
    if (max == kHidden) {
      // A NaN is no maximum: what is not hidden here is one.
      for (size_t k = 0; k < keys; ++k) {
        p[k] = p[k] == kHidden ? T(0) : p[k];
        row_sum[r] += p[k];
      }
      return;
    }
    const V shift = hn::Set(d, max);
    T sum;
    if (plain) {
      const PlainScale scale(scores.scale);
      sum = ReplaceRow(scores, p, [&](V x) HWY_ATTR {
        return scale.Probability(d, x, shift);
      });
    } else {
      sum = ReplaceRow(scores, p,
                       [&](V x) HWY_ATTR { return Exp(d, hn::Sub(x, shift)); });
    }
    T shrink = T(1);
    if (max != before) {
      shrink = before == kHidden ? T(0) : std::exp(before - max);
      T* const o = Row(out, r);
      for (int64_t c = 0; c < out.stride; c += static_cast<int64_t>(lanes)) {
        hn::Store(hn::Mul(hn::Load(d, o + c), hn::Set(d, shrink)), d, o + c);
      }
      row_max[r] = max;
    }
    row_sum[r] = row_sum[r] * shrink + sum;
    if (scores.views[r].keep != nullptr) {
      Keep(scores.views[r].keep, keys, T(1), p);
    }
  }

  static void Forward(const DirectScores& scores, void* row_max, void* row_sum,
                      DirectRows out) {
    for (int64_t r = 0; r < scores.products.rows; ++r) {
      ForwardRow(scores, r, static_cast<T*>(row_max), static_cast<T*>(row_sum),
                 out);
    }
  }

  static void BackwardRow(const DirectScores& scores, int64_t r, T lse, T delta,
                          T dropout_scale, const DirectRows& dps) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t keys = static_cast<size_t>(scores.keys);
    const uint8_t* const keep = scores.views[r].keep;
    T* const p = Row(scores.products, r);
    T* const dp = Row(dps, r);
    if (keep != nullptr) Keep(keep, keys, dropout_scale, dp);
    const auto gradient = [&](size_t k) HWY_ATTR {
      return hn::Sub(hn::Load(d, dp + k), hn::Set(d, delta));
    };
    if (IsPlain(scores, scores.views[r]) && std::abs(lse) < -kHidden) {
      const PlainScale scale(scores.scale);
      for (size_t k = 0; k < keys; k += lanes) {
        const V x = scale.Probability(d, hn::Load(d, p + k), hn::Set(d, lse));
        hn::Store(x, d, p + k);
        hn::Store(hn::Mul(x, gradient(k)), d, dp + k);
      }
    } else {
      const RowScores row(scores, scores.views[r]);
      for (size_t k = 0; k < keys; k += lanes) {
        M visible;
        V slope = hn::Set(d, T(1));
        const V score = row.At(d, hn::Load(d, p + k), k, visible, slope);
        const V x = hn::IfThenElseZero(visible,
                                       Exp(d, hn::Sub(score, hn::Set(d, lse))));
        hn::Store(x, d, p + k);
        const V ds = hn::Mul(x, hn::Mul(gradient(k), slope));
        hn::Store(hn::IfThenElseZero(visible, ds), d, dp + k);
      }
    }
    if (keep != nullptr) Keep(keep, keys, dropout_scale, p);
  }

  static void Backward(const DirectScores& scores, const void* lse,
                       const void* delta, double dropout_scale,
                       DirectRows dps) {
    for (int64_t r = 0; r < scores.products.rows; ++r) {
      BackwardRow(scores, r, static_cast<const T*>(lse)[r],
                  static_cast<const T*>(delta)[r],
                  static_cast<T>(dropout_scale), dps);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
