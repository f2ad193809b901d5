// SPDX-License-Identifier: Apache-2.0

// Calls of few queries: which they are, and how their keys are cut. K and V
// are read once and cost more than the products, so the keys of a head are
// split over threads (flash-decoding) in parts that follow from the problem
// alone: the bits are the same on any number of threads.
#ifndef FA2_SRC_ATTENTION_FEW_QUERIES_PLAN_H_
#define FA2_SRC_ATTENTION_FEW_QUERIES_PLAN_H_

#include <cstdint>
#include <vector>

#include "src/attention/call/problem.h"
#include "src/simd/engine.h"

namespace fa2::attention {

// Some of the keys that queries of a sequence see.
struct KeyPart {
  int64_t sequence = 0;
  Interval keys;
  // Where it leaves its results for the merge; -1: they are the sequence's.
  int64_t partial = -1;
  // Of the plan's list of merged parts, if it leaves them there.
  int64_t merge = 0;
};

struct FewQueriesPlan {
  int64_t most_rows = 0;       // of queries that share a kv head: Nq x group
  std::vector<KeyPart> parts;  // sequence by sequence
  // The parts of sequences that have several.
  std::vector<Interval> merged;
  int64_t partials = 0;
  bool even = true;  // a part a sequence, all of one length
  int workers = 1;
};

// Whether so few rows of queries share each head of keys that packing keys for
// the engine would cost more than it gains.
bool HasFewQueries(const Problem& problem, const simd::Engine& engine);

// Parts hold the keys that queries see, or with `all_keys` all of them.
void PlanFewQueries(const Problem& problem, bool all_keys, int threads,
                    FewQueriesPlan* plan);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_FEW_QUERIES_PLAN_H_
