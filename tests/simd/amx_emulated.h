// SPDX-License-Identifier: Apache-2.0

// The AMX engines with tile registers in software, for machines without AMX.
#ifndef FA2_TESTS_SIMD_AMX_EMULATED_H_
#define FA2_TESTS_SIMD_AMX_EMULATED_H_

#include "src/simd/amx/engine.h"

namespace fa2::simd {

// nullptr if the CPU lacks AVX-512 or the build has none of it or was made
// without (FA2_TEST_AMX_EMULATED_BLOCKS).
const Engine* EmulatedAmxEngine(AmxTerms terms);

// Largest difference in units of the last place between one tile product on the
// hardware and in software, on random operands. Needs AmxAvailable().
double TileProductDifference(uint32_t seed);

}  // namespace fa2::simd

#endif  // FA2_TESTS_SIMD_AMX_EMULATED_H_
