// SPDX-License-Identifier: Apache-2.0

// lse and delta of a block of queries, as the engine takes them.
#ifndef FA2_SRC_ATTENTION_BACKWARD_ROW_STATISTICS_H_
#define FA2_SRC_ATTENTION_BACKWARD_ROW_STATISTICS_H_

#include "src/attention/backward/buffers.h"

namespace fa2::attention {

// Writes lse and delta = rowsum(O dO) - dlse of the block's queries, and adds
// their terms of dsinks, -exp(sink - lse) delta. `worker.rows` buffers 0 and 1
// are overwritten.
void PrepareRowStatistics(const BackwardState& call,
                          const WorkerBuffers& worker, const BlockRows& queries,
                          const QueryOperands& to);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_BACKWARD_ROW_STATISTICS_H_
