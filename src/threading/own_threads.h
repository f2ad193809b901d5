// SPDX-License-Identifier: Apache-2.0

// Threads made for one call, where those of a library will not do.
#ifndef FA2_SRC_THREADING_OWN_THREADS_H_
#define FA2_SRC_THREADING_OWN_THREADS_H_

namespace fa2::threading {

// Calls worker(argument, i) for i in [0, workers) at the same time, 0 on the
// caller's thread, or for fewer i where the system refuses threads. Returns,
// when these calls have, how many of `threads` threads, the caller's among
// them, it was given at once; `threads` is at least `workers`.
//
// Libraries end the process or hang when the system refuses them a thread: what
// they will start can so be asked for before.
int RunOnOwnThreads(int threads, int workers,
                    void (*worker)(void* argument, int index), void* argument);

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_OWN_THREADS_H_
