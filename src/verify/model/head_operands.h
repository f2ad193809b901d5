// SPDX-License-Identifier: Apache-2.0

// What a pass over one query head reads: its rows, rounded as the products'
// operands are.
#ifndef FA2_SRC_VERIFY_MODEL_HEAD_OPERANDS_H_
#define FA2_SRC_VERIFY_MODEL_HEAD_OPERANDS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "src/verify/model/model.h"
#include "src/verify/model/problem.h"

namespace fa2::verify {

// Head and row where [B, H, N, D] has what the other order of heads and rows
// has at (head, row); `heads_first`: the file's order is [B, H, N, D].
std::pair<int64_t, int64_t> SwappedRow(bool heads_first, int64_t heads,
                                       int64_t rows, int64_t head, int64_t row);

template <class T>
struct HeadOperands {
  HeadOperands(const Problem& problem, const Model& model,
               const Sequence& sequence, int64_t query_head, int64_t kv_head);

  // K and V as a pass with these mistakes reads them.
  void LoadKeys(const Faults& faults);

  const Problem& problem;
  const Model& model;
  const Sequence& sequence;
  int64_t head, kv_head;
  int64_t depth, value_depth;  // columns of q and k, of v
  bool gradients;
  bool dropout;
  double keep_scale;  // 1 / (1 - p)
  double sink;        // -inf: none
  double slope = 0.0;

  // [nq, depth], [nk, depth], [nk, value_depth], [nq, value_depth]; dout as it
  // was before it is rounded; [depth, nk], [value_depth, nk].
  std::vector<T> q, k, v, dout, exact_dout, k_transposed, v_transposed;
  // Squared lengths of rows, for magnitudes.
  std::vector<float> q_squares, k_squares, v_squares, dout_squares;
};

extern template struct HeadOperands<float>;
extern template struct HeadOperands<double>;

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_HEAD_OPERANDS_H_
