// SPDX-License-Identifier: Apache-2.0

// Kernels that multiply q or k by the scale before the scores and round the
// result to 16 bits. Where the factor is no power of 2 that is one rounding
// more: with large channels it moves P by percents, in a way that is known to
// the bit. Such a kernel is held to the answer of the operands that it has
// made, as closely as any other kernel is to its own.
#ifndef FA2_SRC_VERIFY_JUDGE_STYLES_H_
#define FA2_SRC_VERIFY_JUDGE_STYLES_H_

#include <map>
#include <string>
#include <vector>

#include "src/verify/judge/verdict.h"
#include "src/verify/model/answer.h"
#include "src/verify/model/problem.h"

namespace fa2::verify {

struct Style {
  std::string name;                       // "q * scale"
  double q_factor = 0.0, k_factor = 0.0;  // 0: it is not multiplied
  bool in_forward = true, in_backward = true;
};

// Those that change a score of this problem.
std::vector<Style> StylesFor(const Problem& problem);

// The styles that take a part of the error off the failed tensors, best first
// and few; `forward`: the candidate's out and lse, or nullptr.
std::vector<Style> LikelyStyles(
    const Problem& problem, const Forward* forward, const Answer& answer,
    const std::map<std::string, Array4<double>>& candidates,
    const std::vector<TensorVerdict>& verdicts);

// The problem whose q and k are what such a kernel has made of them.
Problem Styled(const Problem& problem, const Style& style);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_STYLES_H_
