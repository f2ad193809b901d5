// SPDX-License-Identifier: Apache-2.0

// The engines for Intel's AMX tile unit (TDPBF16PS: products of bf16, sums in
// f32).
#ifndef FA2_SRC_SIMD_AMX_ENGINE_H_
#define FA2_SRC_SIMD_AMX_ENGINE_H_

#include <cstdint>

#include "src/simd/engine.h"

namespace fa2::simd {

// How values are held as sums of bf16 numbers, and with that how many tile
// products one product takes. A sum of n terms is good to 2^-9n.
enum class AmxTerms {
  // bf16 inputs, P and dS rounded to bf16: 1 product. bf16 `fast`.
  kBf16,
  // The same with P as two terms: 2 products for O and dV. bf16 `fast` where
  // queries see few keys.
  kBf16FewKeys,
  // bf16 inputs, P and dS as three terms: 1 product for S and dP, 3 for the
  // gradients and O. bf16 `exact`.
  kBf16Exact,
  // f16 inputs as two terms (exactly), P and dS too: 4 products for S, which is
  // then as good as in f32, 3 for the rest. f16 `fast`.
  kF16,
  // f16 inputs as two terms (exactly), P and dS as three: 4 and 5 products.
  kF16Exact,
  // Everything as two terms: 3 products. f32 `high`.
  kF32High,
  // Everything as three terms: 6 products, f32's own accuracy.
  kF32,
};

// Whether the CPU has AMX-BF16, the kernel lets this process use it (asked
// once) and this build has the engines.
bool AmxAvailable();

// nullptr unless AmxAvailable().
const Engine* AmxEngine(AmxTerms terms);

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_AMX_ENGINE_H_
