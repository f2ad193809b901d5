// SPDX-License-Identifier: Apache-2.0
#include "src/simd/amx/engine.h"

#include "src/simd/amx/target.h"

#if FA2_AMX_TARGET != 0
#include <cpuid.h>

#include "src/platform/amx_permission.h"
#include "src/simd/amx/select_target.h"
#include "src/simd/target.h"
// After select_target.h.
#include "src/simd/amx/engine-inl.h"

namespace fa2::simd {
namespace {

// AVX512_BF16, for vcvtne2ps2bf16.
bool CpuHasAvx512Bf16() {
  uint32_t a, b, c, d;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return false;
  return (a >> 5 & 1) != 0;
}

}  // namespace

bool AmxAvailable() {
  static const bool available = (AvailableTargets() & FA2_AMX_TARGET) != 0 &&
                                CpuHasAvx512Bf16() && platform::MayUseAmxBf16();
  return available;
}

const Engine* AmxEngine(AmxTerms terms) {
  if (!AmxAvailable()) return nullptr;
  return HWY_NAMESPACE::AmxEngineFor<HWY_NAMESPACE::HardwareTiles>(terms);
}

}  // namespace fa2::simd

#else

namespace fa2::simd {

bool AmxAvailable() { return false; }
const Engine* AmxEngine(AmxTerms) { return nullptr; }

}  // namespace fa2::simd

#endif
