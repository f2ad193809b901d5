// SPDX-License-Identifier: Apache-2.0

// What a row's running maximum and sums make of it.
#ifndef FA2_SRC_ATTENTION_SCORES_FINISH_ROW_H_
#define FA2_SRC_ATTENTION_SCORES_FINISH_ROW_H_

#include <algorithm>
#include <cmath>
#include <limits>

namespace fa2::attention {

// Maximum of the scores, sum of exp(S - max), and the sum of these as the
// product with V took them.
template <typename T>
struct RowState {
  T max = -std::numeric_limits<T>::infinity();
  T sum = T(0);
  T weight = T(0);
};

template <typename T>
struct FinishedRow {
  T lse;
  T factor;  // of what was accumulated
};

// `sink`: a logit that takes probability and no value, or nullptr.
template <typename T>
FinishedRow<T> FinishRow(RowState<T> row, const float* sink) {
  constexpr T kHidden = -std::numeric_limits<T>::infinity();
  T shrink = T(1);
  if (sink != nullptr) {
    // exp(sink) joins the sums under the greater of both maxima.
    const T with_sink = std::max(row.max, static_cast<T>(*sink));
    shrink = row.max == kHidden ? T(0) : std::exp(row.max - with_sink);
    const T of_sink = std::exp(static_cast<T>(*sink) - with_sink);
    row.sum = row.sum * shrink + of_sink;
    row.weight = row.weight * shrink + of_sink;
    row.max = with_sink;
  }
  if (row.sum == T(0)) return {kHidden, T(0)};
  return {row.max + std::log(row.sum), shrink / row.weight};
}

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCORES_FINISH_ROW_H_
