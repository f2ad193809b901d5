// SPDX-License-Identifier: Apache-2.0

// Whether the process has been forked since something was made.
#ifndef FA2_SRC_PLATFORM_FORK_COUNT_H_
#define FA2_SRC_PLATFORM_FORK_COUNT_H_

namespace fa2::platform {

// How many forks, since the first call, lie between that call's process and
// this one: threads started at another count exist in an ancestor only.
int ForkCount();

}  // namespace fa2::platform

#endif  // FA2_SRC_PLATFORM_FORK_COUNT_H_
