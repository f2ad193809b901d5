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
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fa2::simd {
namespace {

HWY_EXPORT(HardwareAmxEngine);

#if FA2_AMX_TARGET != 0
bool CpuHasAmxBf16() {
  uint32_t a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool bf16 = (d >> 22 & 1) != 0;
  const bool tile = (d >> 24 & 1) != 0;
  if (!bf16 || !tile) return false;
  // AVX512_BF16, for vcvtne2ps2bf16.
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return false;
  return (a >> 5 & 1) != 0;
}

// Linux hands out the tile registers' 8 KiB of state only on request, once a
// process (Documentation/arch/x86/xstate.rst): ARCH_REQ_XCOMP_PERM of
// XFEATURE_XTILEDATA. Seccomp or an old kernel may refuse.
bool RequestTilePermission() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0;
}
#endif

}  // namespace

bool AmxAvailable() {
#if FA2_AMX_TARGET != 0
  static const bool available = (AvailableTargets() & FA2_AMX_TARGET) != 0 &&
                                CpuHasAmxBf16() && RequestTilePermission();
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
