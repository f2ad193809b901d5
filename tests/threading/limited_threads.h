// SPDX-License-Identifier: Apache-2.0

// A pthread_create that stands before the system's, and refuses threads beyond
// a limit.
#ifndef FA2_TESTS_THREADING_LIMITED_THREADS_H_
#define FA2_TESTS_THREADING_LIMITED_THREADS_H_

namespace fa2::test {

// From now on as many threads may be there at once, beside the main one.
void LimitThreads(int limit);
void LimitThreadsNoMore();

// Threads that are there, beside the main one, and how many were refused since
// the limit was set.
int RunningThreads();
int RefusedThreads();

}  // namespace fa2::test

#endif  // FA2_TESTS_THREADING_LIMITED_THREADS_H_
