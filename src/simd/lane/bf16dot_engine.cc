// SPDX-License-Identifier: Apache-2.0
#include "src/simd/lane/bf16dot_engine.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/lane/bf16dot_engine.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/highway.h"
#include "src/simd/lane/bf16dot_target.h"
// For every target: their include guards count them all.
#include "src/simd/lane/engine-inl.h"
#include "src/simd/math/store-inl.h"
#include "src/simd/target.h"

#if FA2_BF16DOT_TARGET != 0 && HWY_TARGET == FA2_BF16DOT_TARGET
#include "src/simd/lane/bf16_rows-inl.h"
#include "src/simd/lane/bf16_scores-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

const Engine* GetBf16DotEngine(Bf16DotTerms terms) {
#if FA2_BF16DOT_TARGET != 0 && HWY_TARGET == FA2_BF16DOT_TARGET
  switch (terms) {
    case Bf16DotTerms::kOne:
      return LaneEngine<Bf16Pairs<1>>::Get("bf16dot", DType::kF32);
    case Bf16DotTerms::kTwo:
      return LaneEngine<Bf16Pairs<2>>::Get("bf16dot", DType::kF32);
    default:
      return LaneEngine<Bf16ScorePairs>::Get("bf16dot", DType::kF32);
  }
#else
  (void)terms;
  return nullptr;
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fa2::simd {

HWY_EXPORT(GetBf16DotEngine);

bool Bf16DotAvailable() {
#if FA2_BF16DOT_TARGET == 0
  return false;
#else
  if ((AvailableTargets() & FA2_BF16DOT_TARGET) == 0) return false;
#if HWY_ARCH_X86
  static const bool available = __builtin_cpu_supports("avx512bf16") != 0;
  return available;
#else
  return true;  // part of the target
#endif
#endif
}

// Known by its maker and not by a timing, which could choose differently, and
// so give other bits, from one process to the next. VDPBF16PS over FMA, both in
// GFLOP/s of one core: AMD Zen 5 502 to 252; Intel Emerald Rapids 85 to
// 165-175, Sapphire Rapids 65-79 to 125-158. Arm's cores have not been
// measured.
bool Bf16DotIsFast() {
#if FA2_BF16DOT_TARGET != 0 && HWY_ARCH_X86
  static const bool amd = __builtin_cpu_is("amd") != 0;
  return amd && Bf16DotAvailable();
#else
  return false;
#endif
}

const Engine* Bf16DotEngine(Bf16DotTerms terms) {
  if (!Bf16DotAvailable()) return nullptr;
  return FA2_TARGET_FUNCTION(GetBf16DotEngine, FA2_BF16DOT_TARGET)(terms);
}

}  // namespace fa2::simd

#endif  // HWY_ONCE
