// SPDX-License-Identifier: Apache-2.0

// Bias, dropout and dS between the caller's layout (rows are queries) and the
// staged layout of a block: [query panel][key][query in panel], in the engine's
// accumulator type.
#ifndef FA2_SRC_SIMD_ROWWISE_STAGING_H_
#define FA2_SRC_SIMD_ROWWISE_STAGING_H_

#include <cstdint>

#include "fa2/types.h"
#include "src/simd/score_types.h"

namespace fa2::simd {

struct StagingKernels {
  // A boolean mask becomes 0 and -inf; padding becomes -inf, so that what a key
  // holds which no query sees does not meet the zeros of padded queries.
  // Returns whether any element of the block is not -inf.
  bool (*stage_bias)(const ScoreMatrix& bias, const StagedShape& shape,
                     void* staged);
  void (*stage_dropout)(const DropoutBlock& dropout, const StagedShape& shape,
                        void* staged);
  // The same as bits, for panels of 32: uint32_t [query panel][key], bit i
  // whether query i of the panel is kept.
  void (*stage_dropout_bits)(const DropoutBlock& dropout,
                             const StagedShape& shape, void* staged);
  // out(i, j) = (add ? out(i, j) : 0) + staged(i, j), rounded once.
  void (*unstage)(const void* staged, const StagedShape& shape, bool add,
                  const ScoreMatrix& out);
  // sums[j] += sum over i of staged(i, j).
  void (*sum_queries)(const void* staged, const StagedShape& shape, void* sums);
  // sums[i] += sum over j of staged(i, j).
  void (*sum_keys)(const void* staged, const StagedShape& shape, void* sums);
  // keep[n] = whether element `first + n` of the stream is kept, n < count.
  void (*keep_mask)(double p, uint64_t seed, uint64_t first, int64_t count,
                    uint8_t* keep);
};

// Kernels for staged arrays of f32 or f64.
const StagingKernels* StagingKernelsFor(DType accumulator, int64_t targets);

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_ROWWISE_STAGING_H_
