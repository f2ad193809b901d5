// SPDX-License-Identifier: Apache-2.0

// The parts of a case on which a mistake is tried.
#ifndef FA2_SRC_VERIFY_JUDGE_UNITS_H_
#define FA2_SRC_VERIFY_JUDGE_UNITS_H_

#include <map>
#include <set>
#include <string>
#include <vector>

#include "src/verify/model/answer.h"

namespace fa2::verify {

// A sequence and a kv head: what shares dK and dV.
struct Unit {
  const Sequence* sequence;
  int64_t kv_head;
  double error = 0.0;
};

// Gradients that are summed over heads or batches: no unit has them.
bool Auxiliary(const std::string& name);

// As many units as confirming a mistake may take, worst first: by the squared
// errors of the failed tensors, each over the squared size of the whole.
std::vector<Unit> ChooseUnits(
    const Problem& problem, const Answer& answer,
    const std::map<std::string, Array4<double>>& candidates,
    const std::set<std::string>& failing);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_UNITS_H_
