// SPDX-License-Identifier: Apache-2.0

// The kinds of pools. `num_threads` is the most workers of a call; fewer run
// where the system or the host gives fewer threads.
#ifndef FA2_SRC_THREADING_POOLS_H_
#define FA2_SRC_THREADING_POOLS_H_

#include <memory>

#include "fa2/context.h"
#include "src/threading/pool.h"

namespace fa2::threading {

// "tbb": oneTBB's workers, which the process shares.
std::unique_ptr<Pool> MakeTbbPool(int num_threads);

// "openmp": threads of the OpenMP runtime that is loaded into the process;
// nullptr where none is. They spin for a while after the host's parallel
// regions, and would take the cores from other threads.
std::unique_ptr<Pool> MakeOpenMpPool(int num_threads);

// "caller": what the program gave.
std::unique_ptr<Pool> MakeCallerPool(int num_threads,
                                     const ThreadPool& threads);

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_POOLS_H_
