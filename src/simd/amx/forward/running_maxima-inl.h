// SPDX-License-Identifier: Apache-2.0

// The online softmax of the forward pass on AMX: running maxima of 32 queries,
// and the factors by which what has been summed so far follows them.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_RUNNING_MAXIMA_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_RUNNING_MAXIMA_INL_H_

#include <cmath>

#include "src/simd/amx/math-inl.h"
#include "src/simd/amx/tile-inl.h"
#include "src/simd/engine.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Whether all of 32 queries have seen something.
HWY_INLINE bool HaveMaxima(const float* m) {
  const FloatTag d;
  const auto nothing = hn::Set(d, -HUGE_VALF);
  return hn::AllFalse(d, hn::Or(hn::Eq(hn::LoadU(d, m), nothing),
                                hn::Eq(hn::LoadU(d, m + 16), nothing)));
}

// Whether a strip's sums of P for 32 queries show that the maxima of the strips
// before served for it too.
HWY_INLINE bool SumsAreLow(const float* sum) {
  const FloatTag d;
  const auto most = hn::Set(d, kMostOfServing);
  return hn::AllTrue(d, hn::And(hn::Le(hn::LoadU(d, sum), most),
                                hn::Le(hn::LoadU(d, sum + 16), most)));
}

// Moves the maxima `m` of 32 queries on to `seen` times `scale` and `ahead`
// more, and the sums `l` with them. Unless set ahead, a maximum stays where it
// is until it would rise by 5.5 (P <= 2^8): any reference serves as well, and
// the accumulator is seldom scaled. Writes the maxima times log2(e), 0 for
// queries that have seen nothing, and `origin` more to `max`. Returns whether
// the accumulator is to be multiplied by `alpha`.
HWY_INLINE bool RaiseMaxima(const float* seen, float scale, float ahead,
                            float origin, float* HWY_RESTRICT m,
                            float* HWY_RESTRICT l, float* HWY_RESTRICT max,
                            Floats (&alpha)[2]) {
  const FloatTag d;
  bool scaled = false;
  const auto least_rise = hn::Set(d, ahead > 0.0f ? 0.0f : 5.5f);
  const auto log2e = hn::Set(d, kLog2E<float>);
  for (int h = 0; h < 2; ++h) {
    const auto old = hn::LoadU(d, m + 16 * h);
    const auto scores = hn::MulAdd(hn::Load(d, seen + 16 * h),
                                   hn::Set(d, scale), hn::Set(d, ahead));
    const auto raise = hn::Gt(scores, hn::Add(old, least_rise));
    const auto now = hn::IfThenElse(raise, scores, old);
    auto factor = hn::Set(d, 1.0f);
    if (!hn::AllFalse(d, raise)) {
      const Floats fall = Exp2(hn::Mul(hn::Sub(old, now), log2e));
      factor = hn::IfThenElse(raise, fall, factor);
      hn::StoreU(hn::Mul(hn::LoadU(d, l + 16 * h), factor), d, l + 16 * h);
      hn::StoreU(now, d, m + 16 * h);
      scaled = true;
    }
    alpha[h] = factor;
    // Queries that have seen nothing: exp2(-inf - 0) = 0.
    const auto seen_any = hn::Ne(now, hn::Set(d, -HUGE_VALF));
    hn::StoreU(hn::Add(hn::IfThenElseZero(seen_any, hn::Mul(now, log2e)),
                       hn::Set(d, origin)),
               d, max + 16 * h);
  }
  return scaled;
}

// Multiplies the accumulator of 32 queries, `tiles` of 1 KiB, by alpha.
template <class Tiles>
HWY_INLINE void ScaleQueries(uint8_t* out, int64_t tiles,
                             const Floats (&alpha)[2]) {
  const WordTag words;
  // QueryOfLane.
  alignas(64) static constexpr uint32_t kLanes[16] = {
      0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  const Words lanes = hn::Load(words, kLanes);
  const Floats by_half[2] = {
      LookUp(alpha[0], alpha[1], lanes),
      LookUp(alpha[0], alpha[1], hn::Add(lanes, hn::Set(words, 4u)))};
  for (int64_t tile = 0; tile < tiles; ++tile) {
    uint8_t* const rows = out + tile * kTileBytes;
    for (int row = 0; row < 16; ++row) {
      StoreRow(hn::Mul(LoadRow(rows + 64 * row), by_half[tile % 2]),
               rows + 64 * row);
    }
  }
  Tiles::Fence();
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_RUNNING_MAXIMA_INL_H_
