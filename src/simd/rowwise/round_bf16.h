// SPDX-License-Identifier: Apache-2.0

// f32 to bf16, elementwise.
#ifndef FA2_SRC_SIMD_ROWWISE_ROUND_BF16_H_
#define FA2_SRC_SIMD_ROWWISE_ROUND_BF16_H_

#include <cstddef>
#include <cstdint>

namespace fa2::simd {

// to[i] = from[i] rounded to nearest, ties to even; a NaN becomes a quiet NaN
// that keeps its sign and upper payload. `targets` as in target.h.
void RoundToBf16(int64_t targets, const float* from, size_t count,
                 uint16_t* to);

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_ROWWISE_ROUND_BF16_H_
