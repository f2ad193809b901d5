// SPDX-License-Identifier: Apache-2.0

// The engine for instructions that sum products of bf16 pairs into f32: x86
// AVX512_BF16's VDPBF16PS, Arm's BFDOT.
#ifndef FA2_SRC_SIMD_LANE_BF16DOT_ENGINE_H_
#define FA2_SRC_SIMD_LANE_BF16DOT_ENGINE_H_

#include "src/simd/engine.h"

namespace fa2::simd {

// How P is held for the products V^T P and P^T dO; the inputs are bf16.
enum class Bf16DotTerms {
  kOne,  // rounded to bf16, as dS is
  kTwo,  // two bf16 terms: 6 products instead of 5, 3 instead of 2 in forward
  kAll,  // f32, as dS is: pairs for S and dP only, FMA for the rest
};

// Whether the CPU has the instructions and this build has the engine.
bool Bf16DotAvailable();

// Whether they outrun the CPU's FMA.
bool Bf16DotIsFast();

// nullptr unless Bf16DotAvailable().
const Engine* Bf16DotEngine(Bf16DotTerms terms);

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_LANE_BF16DOT_ENGINE_H_
