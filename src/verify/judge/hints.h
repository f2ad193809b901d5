// SPDX-License-Identifier: Apache-2.0

// What a candidate's tensors say at once of the mistake in them, so that fewer
// are tried, and tiles of any size are found.
#ifndef FA2_SRC_VERIFY_JUDGE_HINTS_H_
#define FA2_SRC_VERIFY_JUDGE_HINTS_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "src/verify/model/answer.h"
#include "src/verify/model/array4.h"
#include "src/verify/model/problem.h"

namespace fa2::verify {

struct Hints {
  std::set<std::string> failing;

  // Rows at the end that are zeros in all heads, of the candidate and of the
  // answer; -1: the tensor is not there.
  int64_t zero_keys = -1, zero_keys_of_answer = 0;
  int64_t zero_queries = -1;

  // Keys of score 0 that lse has more of; 0: nothing of the kind.
  int64_t more_keys = 0;

  bool Fails(const std::string& name) const { return failing.count(name) != 0; }
  // Whether a backward whose last `keys` add nothing is possible.
  bool MaySkipKeys(int64_t keys) const {
    return zero_keys < 0 || (keys <= zero_keys && keys > zero_keys_of_answer);
  }
};

// `failing`: the tensors that are to be explained.
Hints FindHints(const Problem& problem, const Answer& answer,
                const std::map<std::string, Array4<double>>& candidates,
                const std::set<std::string>& failing);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_HINTS_H_
