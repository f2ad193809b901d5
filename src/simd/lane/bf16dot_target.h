// SPDX-License-Identifier: Apache-2.0

// The Highway target that the Bf16Dot engine is compiled for. x86: the least of
// those with AVX-512 in this build, since the two instructions beyond it are
// inline assembly and need nothing better. Arm: the one with BFDOT, which
// Highway has from 1.1. Include after hwy/foreach_target.h.
#ifndef FA2_SRC_SIMD_LANE_BF16DOT_TARGET_H_
#define FA2_SRC_SIMD_LANE_BF16DOT_TARGET_H_

#include "hwy/detect_targets.h"

#if HWY_ARCH_X86_64 && defined(__GNUC__)
#if HWY_TARGETS & HWY_AVX3
#define FA2_BF16DOT_TARGET HWY_AVX3
#elif HWY_TARGETS & HWY_AVX3_DL
#define FA2_BF16DOT_TARGET HWY_AVX3_DL
#elif defined(HWY_AVX3_ZEN4) && (HWY_TARGETS & HWY_AVX3_ZEN4)
#define FA2_BF16DOT_TARGET HWY_AVX3_ZEN4
#elif defined(HWY_AVX3_SPR) && (HWY_TARGETS & HWY_AVX3_SPR)
#define FA2_BF16DOT_TARGET HWY_AVX3_SPR
#endif
#elif HWY_ARCH_ARM_A64 && defined(HWY_NEON_BF16)
#if HWY_TARGETS & HWY_NEON_BF16
#define FA2_BF16DOT_TARGET HWY_NEON_BF16
#endif
#endif

#ifndef FA2_BF16DOT_TARGET
#define FA2_BF16DOT_TARGET 0
#endif

#endif  // FA2_SRC_SIMD_LANE_BF16DOT_TARGET_H_
