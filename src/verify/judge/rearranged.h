// SPDX-License-Identifier: Apache-2.0

// Mistakes that hold the right numbers in the wrong place or size: they are
// found from the answer alone.
#ifndef FA2_SRC_VERIFY_JUDGE_REARRANGED_H_
#define FA2_SRC_VERIFY_JUDGE_REARRANGED_H_

#include <map>
#include <string>
#include <vector>

#include "src/verify/judge/verdict.h"
#include "src/verify/model/answer.h"

namespace fa2::verify {

struct Explained {
  std::string id;
  std::string tensor;
  double error = 0.0;  // relative, of what is left
  std::string detail;  // joins the sentence; may be empty
};

// What failed tensors agree with, as closely as an honest kernel's would with
// the answer.
std::vector<Explained> FindRearranged(
    const Problem& problem, const Answer& answer,
    const std::map<std::string, Array4<double>>& candidates,
    const std::vector<TensorVerdict>& verdicts);

const Array4<double>* MemberOf(const Answer& answer, const std::string& name);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_REARRANGED_H_
