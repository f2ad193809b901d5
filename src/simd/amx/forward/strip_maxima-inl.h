// SPDX-License-Identifier: Apache-2.0

// What S of a strip needs before its exponentials are taken, in the forward
// pass on AMX: the scores in place of S where options or masks change them, and
// the running maxima moved on to what the strip holds.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_STRIP_MAXIMA_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_STRIP_MAXIMA_INL_H_

#include <cmath>
#include <type_traits>

#include "src/simd/amx/bias-inl.h"
#include "src/simd/amx/elements-inl.h"
#include "src/simd/amx/forward/alibi-inl.h"
#include "src/simd/amx/forward/running_maxima-inl.h"
#include "src/simd/amx/forward/strip-inl.h"
#include "src/simd/amx/stream-inl.h"
#include "src/simd/amx/transpose-inl.h"
#include "src/simd/amx/visibility.h"
#include "src/simd/amx/visible_bits-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Maxima of the 32 columns of a sub-block: max[0..1] of columns 0-15, max[2..3]
// of columns 16-31. Two chains a column, since vmaxps takes 4 cycles and two
// start in each.
HWY_INLINE void ColumnMaxima(const uint8_t* s, Floats (&max)[4]) {
  for (int row = 0; row < 16; ++row) {
    for (int half = 0; half < 2; ++half) {
      const uint8_t* t = s + half * 2 * kTileBytes + 64 * row;
      // The second operand is returned when the first is NaN: a NaN reaches P,
      // but not the maximum.
      max[half] = hn::Max(LoadRow(t), max[half]);
      max[2 + half] = hn::Max(LoadRow(t + kTileBytes), max[2 + half]);
    }
  }
}

// A sub-block of S that is to be transformed.
struct TransformBlock {
  uint8_t* s;
  uint16_t visible[kVisibleWords];  // read where kPartial
  const float* bias;
  float position[32];  // of the queries, less `key`
};

// Replaces S by the score with softcap, bias and ALiBi where there are any,
// hides what the queries do not see, and takes the maxima as ColumnMaxima does.
template <class Variant, FusedMode kMode, bool kPartial>
HWY_NOINLINE void TransformScores(const ScoreFactors& factors, int given,
                                  const TransformBlock& b, Floats (&max)[4]) {
  const FloatTag d;
  const Floats scale = hn::Set(d, factors.scale);
  for (int tile_row = 0; tile_row < 16; ++tile_row) {
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * half + tile_row;
      for (int h = 0; h < 2; ++h) {
        uint8_t* at = b.s + (2 * half + h) * kTileBytes + tile_row * 64;
        Floats x = LoadRow(at);
        FloatMask visible =
            FloatMaskOf(kPartial ? b.visible[2 * row + h] : 0xFFFF);
        if constexpr (kMode != FusedMode::kMasked) {
          ScoreSlopes slopes;
          x = Score<kMode, Variant::kFast, false>(
              factors, given, x, scale, scale, b.bias + 32 * row + 16 * h,
              b.position + 16 * h, row, visible, slopes);
        }
        if (kPartial || (OptionsOf(kMode) & kHasBias) != 0) {
          x = hn::IfThenElse(visible, x, hn::Set(d, -HUGE_VALF));
        }
        StoreRow(x, at);
        max[2 * h + half] = hn::Max(x, max[2 * h + half]);
      }
    }
  }
}

// The maxima of the 32 queries of the strip at hand. kMode: that of the
// exponentials to come.
template <class Variant>
class StripMaxima {
 public:
  // S of a strip's sub-blocks is at `s`; `bias` has room for one of
  // bias_stream.
  StripMaxima(const ForwardBlock& block, const SubBlockMap& sub_blocks,
              uint8_t* s, float* bias)
      : b_(block),
        sub_blocks_(sub_blocks),
        s_(s),
        bias_(bias),
        given_(GivenOptions(block.score) &
               (kHasBias | kHasAlibi | kHasSoftcap)),
        // A negative scale turns maxima of products into minima.
        mode_(block.score.scale > 0.0 ? ModeOf(given_) : FusedMode::kGeneral),
        factors_(block.score, 1.0),
        products_bias_(block.score),
        scale_(mode_ == FusedMode::kPlain ? factors_.scale : 1.0f),
        alibi_(block.score) {}

  FusedMode mode() const { return mode_; }
  const AlibiMaxima& alibi() const { return alibi_; }
  // S of sub-block i of the strip.
  uint8_t* ScoreTile(int64_t i) const { return s_ + i * 4 * kTileBytes; }
  // What is subtracted in the exponentials, times log2(e) and with ExpOrigin.
  const float* max() const { return max_; }
  // The same as the scores are, 0 for queries that have seen nothing.
  const float* NaturalMax(int64_t query, float* natural) const {
    const float* m = static_cast<const float*>(b_.row_max) + 32 * query;
    for (int i = 0; i < 32; ++i) natural[i] = m[i] == -HUGE_VALF ? 0.0f : m[i];
    return natural;
  }
  // The strip's own maxima have not been looked for.
  bool kept() const { return kept_; }

  // Whether S of the strip's sub-block i is replaced by the scores before
  // exponentials are taken. Where all is visible, kAlibi and kSoftcap are
  // worked in with these, and S may have its bias.
  template <FusedMode kMode>
  bool Transforms(const Strip& strip, int64_t i) const {
    if (kMode == FusedMode::kPlain) return false;
    if (kMode == FusedMode::kBias) return strip.sum[i] != SumState::kBias;
    const int64_t key = strip.key[i], query = strip.query;
    if (!sub_blocks_.At(key, query).visible()) return true;
    return kMode == FusedMode::kAlibi && !alibi_.OneSided(key, query);
  }

  // Whether exponentials of a strip may be taken with the maxima of the strips
  // before: most strips raise none, and to find that out takes 65 cycles a
  // sub-block. Sums tell if one was too low.
  template <FusedMode kMode>
  bool MayKeep(const Strip& strip) {
    if (strip.query < 0) return false;
    if (strip.first) {
      may_keep_ = true;
      serves_until_ = kMode == FusedMode::kAlibi ? -HUGE_VALF : HUGE_VALF;
    }
    if (!may_keep_ || alibi_.LastGrown(strip) > serves_until_) return false;
    for (int64_t i = 0; i < strip.count; ++i) {
      if (!sub_blocks_.At(strip.key[i], strip.query).visible() ||
          Transforms<kMode>(strip, i)) {
        return false;
      }
    }
    const float* m = static_cast<const float*>(b_.row_max) + 32 * strip.query;
    return HaveMaxima(m) && !HasLargeScores(m, 1.0f);
  }

  // After maxima that were too low: where scores grow along the keys it would
  // be so strip after strip, and a strip done twice costs more. For the rest of
  // the queries' strips in this block, whatever other queries have seen.
  void KeepNoMore() { may_keep_ = false; }

  // Before a strip is seen; if `keep`, it need not be.
  void Begin(bool keep) {
    kept_ = keep;
    for (int h = 0; h < 2; ++h) {
      StoreRow(hn::Set(FloatTag(), -HUGE_VALF), seen_ + 16 * h);
    }
  }

  // Looks for the strip's maxima, and replaces S where it Transforms.
  template <FusedMode kMode>
  HWY_INLINE void See(const Strip& strip) {
    if (kept_) return;
    Floats max[4];
    NoMaxima(max);
    for (int64_t i = 0; i < strip.count; ++i) {
      SubBlockMaxima<kMode>(strip, i, max);
    }
    SetSeen(max);
  }

  // Rounds the strip's scores into the place of S where they or the running
  // maxima are large: for exponentials of kGeneral with NaturalMax.
  template <FusedMode kMode>
  void RoundIfLarge(Strip& strip) {
    if (kept_ || strip.query < 0) return;
    const float* m = static_cast<const float*>(b_.row_max) + 32 * strip.query;
    strip.large = HasLargeScores(seen_, scale_) || HasLargeScores(m, 1.0f);
    if (!strip.large) return;
    Floats max[4];
    NoMaxima(max);
    for (int64_t i = 0; i < strip.count; ++i) {
      const int64_t key = strip.key[i], query = strip.query;
      uint8_t* const s = ScoreTile(i);
      if (!Transforms<kMode>(strip, i)) {
        if (kMode == FusedMode::kAlibi || kMode == FusedMode::kSoftcap) {
          Transform(sub_blocks_.At(key, query), s, key, query, max);
          continue;
        }
        // S is a product, or one with bias in its unit.
        ScaleScores(s);
      }
      ColumnMaxima(s, max);
    }
    SetSeen(max);
  }

  // Adds a quarter of the bias of sub-block i to S, if that is all there is to
  // do.
  void AddBias(Strip& strip, int64_t i, int64_t quarter) const {
    const int64_t key = strip.key[i], query = strip.query;
    SumState& sum = strip.sum[i];
    if (mode_ != FusedMode::kBias) return;
    if (quarter == 0) {
      const bool fits = sub_blocks_.At(key, query).visible() &&
                        products_bias_.Fits(key, query);
      sum = fits ? SumState::kBias : SumState::kNone;
    }
    if (sum == SumState::kBias &&
        !products_bias_.template Put<true>(key, query, quarter, ScoreTile(i))) {
      sum = SumState::kPartOfBias;
    }
  }

  // Moves the running maxima on, with ALiBi by what scores will grow by, so
  // that they serve for strips to come. Whether what has been summed for the
  // queries is to be multiplied by `alpha`.
  template <FusedMode kMode>
  bool Raise(const Strip& strip, Floats (&alpha)[2]) {
    float ahead = 0.0f;
    if (kMode == FusedMode::kAlibi && !kept_ && !strip.large) {
      ahead = alibi_.Ahead(strip, &serves_until_);
    }
    const int64_t query = 32 * strip.query;
    return RaiseMaxima(seen_, strip.large ? 1.0f : scale_, ahead,
                       ExpOrigin<Variant>(),
                       static_cast<float*>(b_.row_max) + query,
                       static_cast<float*>(b_.row_sum) + query, max_, alpha);
  }

 private:
  void ScaleScores(uint8_t* s) const {
    const Floats scale = hn::Set(FloatTag(), factors_.scale);
    for (int64_t at = 0; at < 4 * kTileBytes; at += 64) {
      StoreRow(hn::Mul(LoadRow(s + at), scale), s + at);
    }
  }

  static HWY_INLINE void NoMaxima(Floats (&max)[4]) {
    for (Floats& m : max) m = hn::Set(FloatTag(), -HUGE_VALF);
  }
  HWY_INLINE void SetSeen(const Floats (&max)[4]) {
    for (int h = 0; h < 2; ++h) {
      StoreRow(hn::Max(max[2 * h], max[2 * h + 1]), seen_ + 16 * h);
    }
  }

  // The maxima of S or the scores, or what they cannot exceed, join `max` as in
  // ColumnMaxima; S is replaced by the scores where it must be.
  template <FusedMode kMode>
  HWY_INLINE void SubBlockMaxima(const Strip& strip, int64_t i,
                                 Floats (&max)[4]) const {
    const int64_t key = strip.key[i], query = strip.query;
    const SubBlock& sub = sub_blocks_.At(key, query);
    if (Transforms<kMode>(strip, i) || !sub.visible()) {
      return Transform(sub, ScoreTile(i), key, query, max);
    }
    if (kMode == FusedMode::kPlain) return ColumnMaxima(ScoreTile(i), max);
    Floats products[4];
    NoMaxima(products);
    ColumnMaxima(ScoreTile(i), products);
    for (int h = 0; h < 2; ++h) {
      const Floats most = hn::Max(products[2 * h], products[2 * h + 1]);
      max[2 * h] = hn::Max(Bound<kMode>(most, key, query, h), max[2 * h]);
    }
  }

  // What the scores of a column of a sub-block do not exceed, from the greatest
  // product.
  template <FusedMode kMode>
  Floats Bound(Floats product, int64_t key, int64_t query, int half) const {
    const FloatTag d;
    if (kMode == FusedMode::kAlibi) {
      return alibi_.Bound(product, key, query, half);
    }
    if (kMode == FusedMode::kBias) {
      return hn::Mul(product, hn::Set(d, factors_.scale));
    }
    return hn::Mul(
        TanhOfSteps(hn::Mul(product, hn::Set(d, factors_.into_steps))),
        hn::Set(d, factors_.softcap));
  }

  void Transform(const SubBlock& sub, uint8_t* s, int64_t key, int64_t query,
                 Floats (&max)[4]) const {
    const ScoreOptions& o = b_.score;
    TransformBlock t;
    t.s = s;
    if (!sub.visible()) VisibleBits(sub, o, key, query, t.visible);
    t.bias = nullptr;
    if (o.bias_stream.given()) {
      t.bias = bias_;
      TakePart(o.bias_stream, key, query, bias_);
    } else if (o.bias != nullptr) {
      t.bias =
          static_cast<const float*>(o.bias) + 32 * StagedRow(o, key, query);
    }
    if (o.query_position != nullptr) alibi_.Positions(key, query, t.position);
    const auto run = [&](auto partial) HWY_ATTR {
      constexpr bool kPartial = decltype(partial)::value;
      switch (mode_) {
        case FusedMode::kPlain:
          return TransformScores<Variant, FusedMode::kMasked, kPartial>(
              factors_, given_, t, max);
        case FusedMode::kBias:
          return TransformScores<Variant, FusedMode::kBias, kPartial>(
              factors_, given_, t, max);
        case FusedMode::kAlibi:
          return TransformScores<Variant, FusedMode::kAlibi, kPartial>(
              factors_, given_, t, max);
        case FusedMode::kSoftcap:
          return TransformScores<Variant, FusedMode::kSoftcap, kPartial>(
              factors_, given_, t, max);
        default:
          return TransformScores<Variant, FusedMode::kGeneral, kPartial>(
              factors_, given_, t, max);
      }
    };
    if (sub.visible()) {
      run(std::false_type());
    } else {
      run(std::true_type());
    }
  }

  const ForwardBlock& b_;
  const SubBlockMap sub_blocks_;
  uint8_t* const s_;
  float* const bias_;
  const int given_;
  const FusedMode mode_;
  const ScoreFactors factors_;
  const BiasOfProducts products_bias_;
  const float scale_;  // of seen_
  const AlibiMaxima alibi_;
  alignas(64) float seen_[32];
  alignas(64) float max_[32];
  bool kept_ = false;
  bool may_keep_ = true;
  float serves_until_ = HUGE_VALF;  // key, see AlibiMaxima::Ahead
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_STRIP_MAXIMA_INL_H_
