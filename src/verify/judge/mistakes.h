// SPDX-License-Identifier: Apache-2.0

// The known mistakes: names, sentences, and what each computes.
#ifndef FA2_SRC_VERIFY_JUDGE_MISTAKES_H_
#define FA2_SRC_VERIFY_JUDGE_MISTAKES_H_

#include <string>
#include <vector>

#include "src/verify/judge/hints.h"
#include "src/verify/model/faults.h"
#include "src/verify/model/problem.h"

namespace fa2::verify {

// What a mistake is and where to look.
const char* SentenceOf(const std::string& id);

// A mistake that the model computes. One id may have several: tiles of other
// sizes, the forward alone, …
struct Mistake {
  std::string id;
  Faults faults;
  // With the candidate's own out and lse the same as another of the list.
  bool same_given = false;
};

// Those that change something in this problem and may explain one of the
// failing tensors, likelier ones first.
std::vector<Mistake> MistakesFor(const Problem& problem, const Hints& hints);

// How much one id is preferred over another that explains the same: lower is
// better.
int RankOf(const std::string& id);
// The id of a rank; empty past the last.
std::string IdOfRank(int rank);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_MISTAKES_H_
