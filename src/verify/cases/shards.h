// SPDX-License-Identifier: Apache-2.0

// A case that lies in pieces, one of each rank of a distributed run, put
// together.
#ifndef FA2_SRC_VERIFY_CASES_SHARDS_H_
#define FA2_SRC_VERIFY_CASES_SHARDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "src/verify/cases/case.h"

namespace fa2::verify {

// "sequence", "zigzag", "striped", "heads" or "batch"; throws Error.
ShardBy ShardByNamed(const std::string& name);

// One case of the ranks', in order. A tensor without the dimension that is cut
// must be the same on all ranks. Throws Error for pieces that do not fit.
Case JoinShards(const std::vector<Case>& ranks, ShardBy by);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_CASES_SHARDS_H_
