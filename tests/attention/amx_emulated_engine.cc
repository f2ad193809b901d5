// SPDX-License-Identifier: Apache-2.0

// Stands in for the library's AMX engines: the same kernels on tile registers
// in software, so that the suites run on them on any CPU with AVX-512.
#include "src/simd/amx/engine.h"
#include "tests/simd/amx_emulated.h"

namespace fa2::simd {

bool AmxAvailable() { return EmulatedAmxEngine(AmxTerms::kBf16) != nullptr; }

const Engine* AmxEngine(AmxTerms terms) { return EmulatedAmxEngine(terms); }

}  // namespace fa2::simd
