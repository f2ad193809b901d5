#include "src/simd/amx/engine.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/amx/engine.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/highway.h"
#include "src/simd/amx/target.h"
// For every target, so that their guards take turns.
#include "src/simd/math/exp-inl.h"
#include "src/simd/math/philox-inl.h"
#include "src/simd/math/transpose-inl.h"
#include "src/simd/target.h"

#if FA2_AMX_TARGET != 0 && HWY_TARGET == FA2_AMX_TARGET
#include "src/simd/amx/instances-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

const Engine* HardwareAmxEngine(AmxTerms terms) {
#if FA2_AMX_TARGET != 0 && HWY_TARGET == FA2_AMX_TARGET
  return AmxEngineFor<HardwareTiles>(terms);
#else
  (void)terms;
  return nullptr;
#endif
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#if FA2_AMX_TARGET != 0
#include <cpuid.h>

#include "src/platform/amx_permission.h"
#endif

namespace fa2::simd {
namespace {

HWY_EXPORT(HardwareAmxEngine);

#if FA2_AMX_TARGET != 0
// AVX512_BF16, for vcvtne2ps2bf16.
bool CpuHasAvx512Bf16() {
  uint32_t a, b, c, d;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return false;
  return (a >> 5 & 1) != 0;
}
#endif

}  // namespace

bool AmxAvailable() {
#if FA2_AMX_TARGET != 0
  static const bool available = (AvailableTargets() & FA2_AMX_TARGET) != 0 &&
                                CpuHasAvx512Bf16() && platform::MayUseAmxBf16();
  return available;
#else
  return false;
#endif
}

const Engine* AmxEngine(AmxTerms terms) {
  if (!AmxAvailable()) return nullptr;
  return FA2_TARGET_FUNCTION(HardwareAmxEngine, FA2_AMX_TARGET)(terms);
}

}  // namespace fa2::simd
#endif  // HWY_ONCE
