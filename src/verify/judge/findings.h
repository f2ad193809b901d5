// SPDX-License-Identifier: Apache-2.0

// What shows in a tensor's bits whatever the answer is: zeros, buffers that
// nobody wrote, one head's result in another's place.
#ifndef FA2_SRC_VERIFY_JUDGE_FINDINGS_H_
#define FA2_SRC_VERIFY_JUDGE_FINDINGS_H_

#include <map>
#include <string>

#include "src/verify/judge/verdict.h"
#include "src/verify/model/array4.h"

namespace fa2::verify {

// Adds sentences to the verdict, and fails it for a head that holds another
// head's bits where their answers differ.
void FindPatterns(const std::map<std::string, Array4<double>>& candidates,
                  const Array4<double>& answer, TensorVerdict* verdict);

// Where a failed tensor is wrong: ranks, heads, rows, columns, parity.
void FindPlaces(const Array4<double>& candidate, const Array4<double>& answer,
                const Shards& shards, TensorVerdict* verdict);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_FINDINGS_H_
