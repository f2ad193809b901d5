// SPDX-License-Identifier: Apache-2.0
#include "src/attention/call/remembered_plans.h"

#include <algorithm>

namespace fa2::attention {
namespace {

bool SameSequence(const Sequence& a, const Sequence& b) {
  return a.q_begin == b.q_begin && a.k_begin == b.k_begin && a.mask == b.mask;
}

}  // namespace

PlannedProblem::Keys PlannedProblem::KeysOf(const ConstTensorView& view) {
  return {view.dtype, view.sizes, view.strides};
}

bool PlannedProblem::Same(const Keys& a, const Keys& b) {
  return a.dtype == b.dtype && a.sizes == b.sizes && a.strides == b.strides;
}

bool PlannedProblem::IsLike(const Problem& problem) const {
  if (!known_ || problem.blocks.given() ||
      variable_length_ != problem.variable_length ||
      alibi_ != problem.options.alibi_slopes.given() ||
      q_heads_ != problem.q_heads || head_dim_ != problem.head_dim ||
      dtype_ != problem.q.dtype || !Same(k_, KeysOf(problem.k)) ||
      !Same(v_, KeysOf(problem.v)) ||
      sequences_.size() != problem.sequences.size()) {
    return false;
  }
  // The elements of a batch are alike.
  const size_t different = variable_length_
                               ? sequences_.size()
                               : std::min<size_t>(1, sequences_.size());
  return std::equal(sequences_.begin(),
                    sequences_.begin() + static_cast<std::ptrdiff_t>(different),
                    problem.sequences.begin(), SameSequence);
}

void PlannedProblem::Set(const Problem& problem) {
  Forget();
  if (problem.blocks.given()) return;
  variable_length_ = problem.variable_length;
  alibi_ = problem.options.alibi_slopes.given();
  q_heads_ = problem.q_heads;
  head_dim_ = problem.head_dim;
  dtype_ = problem.q.dtype;
  k_ = KeysOf(problem.k);
  v_ = KeysOf(problem.v);
  sequences_ = problem.sequences;
  known_ = true;
}

}  // namespace fa2::attention
