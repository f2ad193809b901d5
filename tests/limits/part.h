// SPDX-License-Identifier: Apache-2.0

// Some rows of a call that is too large for the float64 oracle, as a small call
// that must give the same: the queries with the keys that they see, or the keys
// with the queries that see them.
#ifndef FA2_TESTS_LIMITS_PART_H_
#define FA2_TESTS_LIMITS_PART_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/attention_case.h"

namespace fa2::test {

// A dense call without bias, ALiBi, sinks and dlse; causal is kNone, or
// kBottomRight with Nk >= Nq; a window has a left side only, and goes with
// causal and Nq = Nk. `inputs` holds the out and lse that the backward took.
struct WholeCall {
  AttentionCase c;
  AttentionInputs inputs;
  AttentionOutputs outputs;
};

// Rows [first, first + rows) of the queries of batch b and the heads of kv head
// g: out, lse and dq. What is wrong, in words.
std::vector<std::string> CheckQueries(const WholeCall& whole, int64_t b,
                                      int64_t g, int64_t first, int64_t rows);

// Rows [first, first + rows) of these keys, on one side of Nk - Nq where the
// call is causal: dk and dv.
std::vector<std::string> CheckKeys(const WholeCall& whole, int64_t b, int64_t g,
                                   int64_t first, int64_t rows);

}  // namespace fa2::test

#endif  // FA2_TESTS_LIMITS_PART_H_
