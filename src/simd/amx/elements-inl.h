// SPDX-License-Identifier: Apache-2.0

// Scores of 16 elements with options, for the passes of the AMX engines.
//
// Each usual option alone has an instance of the passes of its own, in which it
// is known at compile time, so that they run between tile products as the plain
// pass does; kGeneral tests for all of them at run time.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_ELEMENTS_INL_H_
#define FA2_SRC_SIMD_AMX_ELEMENTS_INL_H_

#include <cmath>

#include "src/simd/amx/math-inl.h"
#include "src/simd/amx/pack-inl.h"
#include "src/simd/engine.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// What a pass may have to do beside the scale and the exponential, as bits.
inline constexpr int kHasBias = 1;
inline constexpr int kHasAlibi = 2;
inline constexpr int kHasSoftcap = 4;
inline constexpr int kHasDropout = 8;
inline constexpr int kGivesScoreGradient = 16;  // BackwardBlock::ds
inline constexpr int kGivesSlopeGradient = 32;
// Scores are rounded before anything is subtracted, see kLargeScore.
inline constexpr int kRoundsScores = 64;

enum class FusedMode {
  kNone,    // nothing before this sub-block
  kPlain,   // P = exp(S - lse), dS = P (dP - delta)
  kMasked,  // the same with bits that tell what is visible, as all below
  kBias,
  kBiasGradient,
  kAlibi,
  kSoftcap,
  kDropout,
  kGeneral,  // any options
};

// The options of an instance; of kGeneral, those it may have.
constexpr int OptionsOf(FusedMode mode) {
  switch (mode) {
    case FusedMode::kBias:
      return kHasBias;
    case FusedMode::kBiasGradient:
      return kHasBias | kGivesScoreGradient;
    case FusedMode::kAlibi:
      return kHasAlibi;
    case FusedMode::kSoftcap:
      return kHasSoftcap;
    case FusedMode::kDropout:
      return kHasDropout;
    case FusedMode::kGeneral:
      return -1;
    default:
      return 0;
  }
}

// The instance for `options` among those there are.
inline FusedMode ModeOf(int options) {
  for (const FusedMode mode :
       {FusedMode::kPlain, FusedMode::kBias, FusedMode::kBiasGradient,
        FusedMode::kAlibi, FusedMode::kSoftcap, FusedMode::kDropout}) {
    if (OptionsOf(mode) == options) return mode;
  }
  return FusedMode::kGeneral;
}

// Whether the option is given; `given` is read by kGeneral alone.
template <FusedMode kMode>
HWY_INLINE bool Has(int option, int given) {
  return (kMode == FusedMode::kGeneral ? given & option
                                       : OptionsOf(kMode) & option) != 0;
}

// Where a bias may be, exponents are (score - lse) log2(e): a bias of -3e38,
// which hides a key, times log2(e) would be infinite. With three terms too,
// since rounding lse log2(e) to f32 costs as much as all the rest. Elsewhere
// log2(e) is in the factors.
template <class Variant>
constexpr bool InLog2(FusedMode mode) {
  return Variant::kProbabilityTerms < 3 && (OptionsOf(mode) & kHasBias) == 0;
}

// What ProbabilityExp2 is taken of, for an exponent that is not InLog2.
template <class Variant>
HWY_INLINE Floats IntoLog2(Floats x) {
  const FloatTag d;
  const Floats log2e = hn::Set(d, kLog2E<float>);
  if (Variant::kExpDegree == 0) return hn::Mul(x, log2e);
  return hn::MulSub(x, log2e, hn::Set(d, ExpOrigin<Variant>()));
}

// What dropout multiplies the elements that it keeps by, if it keeps any.
inline double KeptFactor(const ScoreOptions& o) {
  return o.dropout_scale > 0.0 ? o.dropout_scale : 1.0;
}

// Options as the passes use them; those of scores times `unit`.
struct ScoreFactors {
  ScoreFactors() = default;
  ScoreFactors(const ScoreOptions& o, double unit)
      : scale(static_cast<float>(o.scale * unit)),
        into_cap(
            static_cast<float>(o.softcap == 0.0 ? 0.0 : o.scale / o.softcap)),
        into_steps(kTanhSteps * into_cap),
        softcap(static_cast<float>(o.softcap * unit)),
        slope(static_cast<float>(o.alibi_slope * unit)),
        kept(static_cast<float>(KeptFactor(o))) {}
  float scale = 0.0f;
  float into_cap = 0.0f;    // what tanh is taken of
  float into_steps = 0.0f;  // and TanhOfSteps
  float softcap = 0.0f;
  float slope = 0.0f;
  float kept = 0.0f;
};

inline int GivenOptions(const ScoreOptions& o) {
  return (o.bias != nullptr || o.bias_stream.given() ? kHasBias : 0) |
         (o.alibi_slope != 0.0 ? kHasAlibi : 0) |
         (o.softcap != 0.0 ? kHasSoftcap : 0) |
         (o.dropout != nullptr || o.dropout_stream.p > 0.0 ? kHasDropout : 0);
}

// Whether any of 32 row statistics, times `scale`, is larger than kLargeScore
// and finite.
HWY_INLINE bool HasLargeScores(const float* statistics, float scale) {
  const FloatTag d;
  uint32_t large = 0;
  for (int h = 0; h < 2; ++h) {
    const Floats size =
        hn::Abs(hn::Mul(hn::LoadU(d, statistics + 16 * h), hn::Set(d, scale)));
    large |= BitsOf(hn::And(hn::Gt(size, hn::Set(d, kLargeScore)),
                            hn::Lt(size, hn::Set(d, HUGE_VALF))));
  }
  return large != 0;
}

// The row of staged arrays where a sub-block, in panels, begins.
inline int64_t StagedRow(const ScoreOptions& o, int64_t key, int64_t query) {
  return query * o.staged_key_rows + 32 * key;
}

// What the way back needs.
struct ScoreSlopes {
  Floats softcap;   // d (S after softcap) / d (S before)
  Floats distance;  // of ALiBi
};

// A score in the unit of `f`, less `less` where kLess. `bias` points to those
// of the 16 elements; `position` is the queries' less that of the sub-block's
// first key, `row` the key in the sub-block. A bias of -inf hides.
template <FusedMode kMode, bool kFast, bool kLess>
HWY_INLINE Floats Score(const ScoreFactors& f, int given, Floats product,
                        Floats scale, Floats less, const float* bias,
                        const float* position, int row, FloatMask& visible,
                        ScoreSlopes& slopes) {
  const FloatTag d;
  const bool rounds =
      kMode == FusedMode::kGeneral && kLess && (given & kRoundsScores) != 0;
  Floats x = product;
  if (Has<kMode>(kHasSoftcap, given)) {
    x = kFast ? TanhOfSteps(hn::Mul(x, hn::Set(d, f.into_steps)))
              : Tanh(hn::Mul(x, hn::Set(d, f.into_cap)));
    slopes.softcap = hn::NegMulAdd(x, x, hn::Set(d, 1.0f));
    scale = hn::Set(d, f.softcap);
  }
  if (Has<kMode>(kHasBias, given)) {
    const Floats b = hn::LoadU(d, bias);
    visible = AndDiffer(visible, b, hn::Set(d, -HUGE_VALF));
    x = hn::MulAdd(x, scale, kLess && !rounds ? hn::Sub(b, less) : b);
  } else if (rounds) {
    // Not a product, which the compiler would fuse with the difference.
    x = hn::MulAdd(x, scale, hn::Zero(d));
  } else if (kLess) {
    x = hn::MulSub(x, scale, less);
  } else {
    x = hn::Mul(x, scale);
  }
  if (Has<kMode>(kHasAlibi | kGivesSlopeGradient, given)) {
    slopes.distance = hn::Abs(
        hn::Sub(hn::LoadU(d, position), hn::Set(d, static_cast<float>(row))));
    x = hn::NegMulAdd(hn::Set(d, f.slope), slopes.distance, x);
  }
  if (rounds) x = hn::Sub(x, less);
  return x;
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_ELEMENTS_INL_H_
