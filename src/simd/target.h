// SPDX-License-Identifier: Apache-2.0

// Names of Highway's targets, and dispatch to a chosen one (Highway's own
// macros only know the best one).
#ifndef FA2_SRC_SIMD_TARGET_H_
#define FA2_SRC_SIMD_TARGET_H_

#include <cstdint>
#include <string>
#include <vector>

#include "hwy/highway.h"

namespace fa2::simd {

// Bit mask of targets (HWY_AVX2 | ...) that this build and this CPU both have.
int64_t AvailableTargets();

// Lower-case names of the targets in the mask, best first; "avx3", "sse4",
// "emu128", ...
std::vector<std::string> TargetNames(int64_t targets);

// The available targets up to and including the one named (targets are capped,
// not selected). 0 if the name is unknown or names a target that is not
// available.
int64_t TargetsUpTo(const std::string& name);

// Name of the best target in the mask.
std::string BestTargetName(int64_t targets);

}  // namespace fa2::simd

// The function that HWY_EXPORT(FUNC) made for the best target in the mask. Only
// usable in the translation unit of that HWY_EXPORT, since the table's layout
// depends on the targets compiled there.
#if (HWY_TARGETS & (HWY_TARGETS - 1)) == 0
#define FA2_TARGET_FUNCTION(FUNC, targets) \
  ((void)(targets), &HWY_STATIC_DISPATCH(FUNC))
#else
#define FA2_TARGET_FUNCTION(FUNC, targets)   \
  (HWY_DISPATCH_TABLE(FUNC)[([](int64_t t) { \
    hwy::ChosenTarget chosen;                \
    chosen.Update(t);                        \
    return chosen.GetIndex();                \
  })(targets)])
#endif

#endif  // FA2_SRC_SIMD_TARGET_H_
