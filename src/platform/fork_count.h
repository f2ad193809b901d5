// SPDX-License-Identifier: Apache-2.0

// Whether the process has been forked since something was made.
#ifndef FA2_SRC_PLATFORM_FORK_COUNT_H_
#define FA2_SRC_PLATFORM_FORK_COUNT_H_

namespace fa2::platform {

// How many forks this process descends from since it loaded the library:
// threads started at another count exist in an ancestor only. On Linux one more
// where it had been forked before, without an exec since: an ancestor may have
// started threads that libraries take for theirs.
int ForkCount();

}  // namespace fa2::platform

#endif  // FA2_SRC_PLATFORM_FORK_COUNT_H_
