// SPDX-License-Identifier: Apache-2.0

// The engines for fused multiply-adds on vectors of f32 and of f64, of which
// every Highway target has one.
#ifndef FA2_SRC_SIMD_LANE_FMA_ENGINES_H_
#define FA2_SRC_SIMD_LANE_FMA_ENGINES_H_

#include <cstdint>

#include "src/simd/engine.h"

namespace fa2::simd {

// Of the best target in the mask.
const Engine* F32Engine(int64_t targets);
const Engine* F64Engine(int64_t targets);

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_LANE_FMA_ENGINES_H_
