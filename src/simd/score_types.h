// SPDX-License-Identifier: Apache-2.0

// Parts of a query x key matrix as engines take them: arrays of bias, masks and
// dS, and dropout's stream.
#ifndef FA2_SRC_SIMD_SCORE_TYPES_H_
#define FA2_SRC_SIMD_SCORE_TYPES_H_

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

  int64_t elements() const {
    return (padded_queries + panel - 1) / panel * panel * padded_keys;
  }
};

// Elements of a query x key matrix: any float dtype, or kBool.
struct ScoreMatrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t query_stride = 0;
  int64_t key_stride = 0;
};

// Rows of memory that the block after this one reads, to be prefetched
// meanwhile; all zero when that is not known.
struct PrefetchRows {
  const char* data = nullptr;
  int64_t stride = 0;  // bytes
  int64_t rows = 0;
  int64_t bytes = 0;  // of a row
};

// Several of them, of which a list takes so many.
struct PrefetchList {
  static constexpr int kMost = 8;
  PrefetchRows rows[kMost];
  int count = 0;

  void Add(const PrefetchRows& more) {
    if (more.rows > 0 && count < kMost) rows[count++] = more;
  }
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
// Philox4x32-10 stream of `seed` (AttentionOptions::dropout_p).
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

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_SCORE_TYPES_H_
