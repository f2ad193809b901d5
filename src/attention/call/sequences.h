// SPDX-License-Identifier: Apache-2.0

// The sequences of a call: the elements of its batch, or runs of packed rows.
#ifndef FA2_SRC_ATTENTION_CALL_SEQUENCES_H_
#define FA2_SRC_ATTENTION_CALL_SEQUENCES_H_

#include "fa2/status.h"
#include "src/attention/call/problem.h"

namespace fa2::attention {

// Checks the prefix sums of a problem whose tensors and options are set, and
// fills its sequences and greatest lengths.
Status FindSequences(Problem* problem);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_CALL_SEQUENCES_H_
