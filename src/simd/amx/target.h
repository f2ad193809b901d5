// SPDX-License-Identifier: Apache-2.0

// The Highway target that AMX kernels are compiled for: the least of those with
// AVX-512 in this build, since the tile instructions are inline assembly and
// need nothing better. Include after hwy/foreach_target.h.
#ifndef FA2_SRC_SIMD_AMX_TARGET_H_
#define FA2_SRC_SIMD_AMX_TARGET_H_

#include "hwy/detect_targets.h"

#if HWY_ARCH_X86_64 && defined(__linux__)
#if HWY_TARGETS & HWY_AVX3
#define FA2_AMX_TARGET HWY_AVX3
#elif HWY_TARGETS & HWY_AVX3_DL
#define FA2_AMX_TARGET HWY_AVX3_DL
#elif defined(HWY_AVX3_ZEN4) && (HWY_TARGETS & HWY_AVX3_ZEN4)
#define FA2_AMX_TARGET HWY_AVX3_ZEN4
#elif defined(HWY_AVX3_SPR) && (HWY_TARGETS & HWY_AVX3_SPR)
#define FA2_AMX_TARGET HWY_AVX3_SPR
#endif
#endif

#ifndef FA2_AMX_TARGET
#define FA2_AMX_TARGET 0
#endif

#endif  // FA2_SRC_SIMD_AMX_TARGET_H_
