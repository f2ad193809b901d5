// SPDX-License-Identifier: Apache-2.0

// Scratch of one worker for a row of exponentials.
#ifndef FA2_SRC_OPS_ROW_EXP_SCRATCH_H_
#define FA2_SRC_OPS_ROW_EXP_SCRATCH_H_

#include <cstddef>

#include "src/threading/workspace.h"

namespace fa2::ops {

// A row goes in chunks that stay in L1 between their maximum and their sum, so
// that it is read from memory once: 4,096 elements are 16 KiB.
inline constexpr size_t kExpChunk = 4096;

inline size_t ExpChunks(size_t n) { return (n + kExpChunk - 1) / kExpChunk; }

// Numbers for a row of n, f32 or f64 as the kernel computes: its exponentials,
// a shift for each chunk, and room for a vector (2,048 bits in SVE) that begins
// at the last of them. A multiple of a cache line of f32.
inline size_t ExpScratch(size_t n) {
  const size_t floats = ExpChunks(n) * (kExpChunk + 1) + 64;
  return threading::AlignUp(floats * sizeof(float)) / sizeof(float);
}

}  // namespace fa2::ops

#endif  // FA2_SRC_OPS_ROW_EXP_SCRATCH_H_
