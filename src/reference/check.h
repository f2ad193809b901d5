// SPDX-License-Identifier: Apache-2.0

// What the oracle needs of its arguments so that it reads and writes only what
// the views describe. It shares no check with the functions that it judges: a
// fault of theirs must not be its own.
#ifndef FA2_SRC_REFERENCE_CHECK_H_
#define FA2_SRC_REFERENCE_CHECK_H_

#include "fa2/attention.h"

namespace fa2::reference {

Status CheckForward(const AttentionForwardArgs& args);
Status CheckBackward(const AttentionBackwardArgs& args);

}  // namespace fa2::reference

#endif  // FA2_SRC_REFERENCE_CHECK_H_
