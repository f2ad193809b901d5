// SPDX-License-Identifier: Apache-2.0

// Errors that no variation of the computation reproduces: the noise of sums in
// 16 bits, and what a buffer held before.
#ifndef FA2_SRC_VERIFY_JUDGE_NOISE_H_
#define FA2_SRC_VERIFY_JUDGE_NOISE_H_

#include <map>
#include <string>
#include <vector>

#include "src/verify/judge/rearranged.h"
#include "src/verify/judge/verdict.h"
#include "src/verify/model/answer.h"

namespace fa2::verify {

// For the failed tensors named, which nothing else explains.
std::vector<Explained> FindNoise(
    const Problem& problem, const Answer& answer,
    const std::map<std::string, Array4<double>>& candidates,
    const std::vector<const TensorVerdict*>& verdicts, int threads);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_NOISE_H_
