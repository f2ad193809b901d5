// SPDX-License-Identifier: Apache-2.0

// Products of a few rows of queries with keys and values as the caller stores
// them: nothing is packed, and each key is read once. The rows of queries are
// of the accumulator's type, T below (float or double); arrays of T are `void`.
#ifndef FA2_SRC_SIMD_DIRECT_DIRECT_H_
#define FA2_SRC_SIMD_DIRECT_DIRECT_H_

#include <cstddef>
#include <cstdint>

#include "fa2/types.h"
#include "src/common/integers.h"
#include "src/simd/engine.h"
#include "src/simd/score_types.h"

namespace fa2::simd {

// Keys that row after row of queries comes to: 64 of 128 bf16 are 16 KiB, which
// stay in L1.
inline constexpr int64_t kDirectKeyBlock = 64;
// Keys that a call takes at most.
inline constexpr int64_t kDirectKeys = 16 * kDirectKeyBlock;

// Rows of T. Whole vectors may be read and written: the stride is a multiple of
// kDirectLanes, and what lies past the columns is zero, or ignored.
struct DirectRows {
  void* data = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
};
inline constexpr int64_t kDirectLanes = 64;  // floats of the widest vector

// How one row of queries sees a run of keys.
struct DirectView {
  Interval keys;             // of the run
  ScoreMatrix bias;          // from the run's first key; data nullptr: none
  double alibi_slope = 0.0;  // times |position - key|, keys counted in the run
  double position = 0.0;
  const uint8_t* keep = nullptr;  // dropout: whether a key's P is kept
};

// Scores of rows of queries and a run of keys: on entry the products q k,
// [row][key].
struct DirectScores {
  DirectRows products;
  int64_t keys = 0;
  const DirectView* views = nullptr;  // of each row
  double scale = 1.0;
  double softcap = 0.0;
};

struct DirectKernels {
  // products[r][k] = x[r] * rows[k]. Of `following` rows that lie behind `rows`
  // the next ones are prefetched.
  void (*multiply)(const DirectRows& x, const Rows& rows, int64_t following,
                   DirectRows products);
  // out[r] += sum over k of weights[r][k] rows[k].
  void (*combine)(const DirectRows& weights, const Rows& rows,
                  int64_t following, DirectRows out);
  // out[k] = factor * sum over r of weights[r][k] x[r], for `keys` keys and
  // `columns` columns. The rows of out may be those of a tensor: any stride,
  // and what lies past the columns is left alone.
  void (*spread)(const DirectRows& weights, int64_t keys, const DirectRows& x,
                 int64_t columns, double factor, DirectRows out);

  // Scores become P = exp(S - m), with the maxima m [row] of all keys so far;
  // sums [row] go on, and what `out` holds so far is scaled for greater
  // maxima. P that dropout leaves out is 0, but not in the sums.
  void (*forward_scores)(const DirectScores& scores, void* row_max,
                         void* row_sum, DirectRows out);
  // Scores become P, less dropout, times dropout_scale; and dp, on entry dO V,
  // becomes dS = P (dP - delta), without the scale.
  void (*backward_scores)(const DirectScores& scores, const void* lse,
                          const void* delta, double dropout_scale,
                          DirectRows dp);

  // Widens rows, zeros up to the stride behind them.
  void (*widen)(const Rows& rows, DirectRows out);
  // The same with 0 for NaN and infinity, if there are any; else false, and
  // `out` is left alone.
  bool (*widen_finite)(const Rows& rows, DirectRows out);
};

// Kernels for T of f32 or f64.
const DirectKernels* DirectKernelsFor(DType accumulator, int64_t targets);

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_DIRECT_DIRECT_H_
