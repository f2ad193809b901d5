// SPDX-License-Identifier: Apache-2.0

// Kernels over rows that stand beside the matrix products: delta, the end of
// the softmax, and storing accumulated rows in the caller's dtype.
#ifndef FA2_SRC_SIMD_ROWWISE_ROWS_H_
#define FA2_SRC_SIMD_ROWWISE_ROWS_H_

#include <cstdint>

#include "fa2/types.h"
#include "src/simd/engine.h"

namespace fa2::simd {

// For one accumulator type T (float or double); arrays of T are `void`.
struct RowKernels {
  // sums[r] = sum over d of a[r][d] * b[r][d]. Dtypes that T can hold.
  void (*dot)(const Rows& a, const Rows& b, void* sums);

  // out[r][d] = (add ? out[r][d] : 0) + rows[r][d] * factor * row_factor[r],
  // rounded once; row_factor may be nullptr (all 1).
  void (*store)(const void* rows, int64_t row_stride, int64_t count,
                int64_t depth, double factor, const void* row_factor, bool add,
                const MutableRows& out);

  // sum[i] += term[i].
  void (*add)(void* sum, const void* term, int64_t count);

  // out[i] = rows.data[i] of one row, widened.
  void (*widen)(const Rows& row, void* out);

  // Ends the forward's softmax of `count` rows. In: the maxima of their scores,
  // the sums of exp(S - max), and the weights, which are these sums as the
  // product with V took them (may be the same array). Out: the logsumexp in
  // place of the maxima, and what O is to be multiplied with in place of the
  // weights; -inf and 0 for rows that have seen nothing. `sink`: a logit that
  // takes probability and no value, or nullptr.
  void (*finish)(void* max, const void* sum, void* weight, int64_t count,
                 const float* sink);
};

// Kernels for accumulators of f32 or f64.
const RowKernels* RowKernelsFor(DType accumulator, int64_t targets);

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_ROWWISE_ROWS_H_
