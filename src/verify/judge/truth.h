// SPDX-License-Identifier: Apache-2.0

// What a candidate is held against: the answer, and what a kernel's roundings
// make of it.
#ifndef FA2_SRC_VERIFY_JUDGE_TRUTH_H_
#define FA2_SRC_VERIFY_JUDGE_TRUTH_H_

#include <optional>
#include <string>

#include "src/verify/judge/verdict.h"
#include "src/verify/model/answer.h"

namespace fa2::verify {

// The answer and the twin of one mode.
struct Truth {
  Answer answer;
  std::optional<Results<float>> twin_f32;
  std::optional<Results<double>> twin_f64;

  Expected Of(const std::string& name) const;
};

// `forward`: out and lse that are given; nullptr for the whole chain. Throws
// Error where fa2 refuses the case.
Truth ComputeTruth(const Problem& problem, const Forward* forward, bool plain,
                   int threads);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_TRUTH_H_
