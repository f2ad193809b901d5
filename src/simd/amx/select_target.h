// SPDX-License-Identifier: Apache-2.0

// Compiles the rest of a translation unit for the one Highway target of the AMX
// kernels, without hwy/foreach_target.h: include first, under
// `#if FA2_AMX_TARGET != 0`.
#ifndef FA2_SRC_SIMD_AMX_SELECT_TARGET_H_
#define FA2_SRC_SIMD_AMX_SELECT_TARGET_H_

#include "src/simd/amx/target.h"

#ifdef HWY_HIGHWAY_INCLUDED
#error "hwy/highway.h has chosen another target"
#endif
#undef HWY_TARGET
#define HWY_TARGET FA2_AMX_TARGET

#include "hwy/highway.h"

#endif  // FA2_SRC_SIMD_AMX_SELECT_TARGET_H_
