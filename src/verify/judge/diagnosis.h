// SPDX-License-Identifier: Apache-2.0

// Which of the known mistakes a candidate has made.
#ifndef FA2_SRC_VERIFY_JUDGE_DIAGNOSIS_H_
#define FA2_SRC_VERIFY_JUDGE_DIAGNOSIS_H_

#include <map>
#include <string>
#include <vector>

#include "src/verify/judge/check.h"
#include "src/verify/judge/verdict.h"
#include "src/verify/model/answer.h"

namespace fa2::verify {

// At most three mistakes, best first. A mistake is named for the failed tensors
// that agree with it as an honest kernel would with the right answer. `forward`
// is the candidate's out and lse, or nullptr where it lacks one.
std::vector<Diagnosis> Diagnose(
    const Problem& problem, const Forward* forward, const Answer& answer,
    const std::map<std::string, Array4<double>>& candidates,
    const std::vector<TensorVerdict>& verdicts, int threads);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_DIAGNOSIS_H_
