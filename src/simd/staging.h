// Bias, dropout and dS between the caller's layout (rows are queries) and the
// staged layout of a block: [query panel][key][query in panel], in the engine's
// accumulator type.
#ifndef FA2_SRC_SIMD_STAGING_H_
#define FA2_SRC_SIMD_STAGING_H_

#include <cstdint>

#include "fa2/types.h"

namespace fa2::simd {

// A block of `queries` x `keys` elements, staged with `padded_keys` rows a
// panel and `padded_queries` columns in panels of `panel`.
struct StagedShape {
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t padded_queries = 0;
  int64_t padded_keys = 0;
  int64_t panel = 0;

  int64_t elements() const { return padded_queries * padded_keys; }
};

// Elements of a query x key matrix: any float dtype, or kBool.
struct ScoreMatrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t query_stride = 0;
  int64_t key_stride = 0;
};

// Rows of memory that the block after this one reads, to be asked for
// meanwhile; all zero when that is not known.
struct RowsAhead {
  const char* data = nullptr;
  int64_t stride = 0;  // bytes
  int64_t rows = 0;
  int64_t bytes = 0;  // of a row
};

struct StagingKernels;

// A block of such elements, for engines that take or give them as they come to
// them (Engine::streams_scores).
struct ScoreStream {
  const StagingKernels* staging = nullptr;  // nullptr: there is none
  ScoreMatrix matrix;                       // from the block's first element
  int64_t queries = 0;  // that there are; the rest is padding
  int64_t keys = 0;
  bool add = false;  // to what is there

  bool given() const { return staging != nullptr; }
};

// Element (i, j) of the block is number `first + i * query_stride + j` of the
// Philox4x32-10 stream of `seed` (seeds.md, system 3).
struct DropoutBlock {
  double p = 0.0;
  double scale = 1.0;  // what a kept element is multiplied with
  uint64_t seed = 0;
  uint64_t first = 0;
  uint64_t query_stride = 0;

  // Of the first element's Philox block, which is number first / 4.
  uint32_t UpperWord() const { return static_cast<uint32_t>(first >> 34); }
  // Whether it is that of all blocks of queries x keys elements.
  bool SharesUpperWord(int64_t queries, int64_t keys) const {
    const uint64_t last = first +
                          static_cast<uint64_t>(queries - 1) * query_stride +
                          static_cast<uint64_t>(keys - 1);
    return last >> 34 == first >> 34;
  }
  // Whether queries can be the lanes of vectors: every row begins with a whole
  // Philox block, and some but not all elements are kept.
  bool by_lanes(int64_t queries, int64_t keys) const {
    return first % 4 == 0 && query_stride % 4 == 0 && p > 1e-9 && p < 1.0 &&
           SharesUpperWord(queries, keys);
  }
};

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

#endif  // FA2_SRC_SIMD_STAGING_H_
