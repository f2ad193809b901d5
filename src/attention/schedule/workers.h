// SPDX-License-Identifier: Apache-2.0

// How many items a call is to have, and how many threads are worth their
// waking.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_WORKERS_H_
#define FA2_SRC_ATTENTION_SCHEDULE_WORKERS_H_

#include <cstdint>

namespace fa2::attention {

// Items of all heads that a plan aims at, as many as 64 cores can take.
inline constexpr int64_t kWantedItems = 64;

// How many of `threads` a call of so many operations is soonest through with,
// if no step has more than `items` items. One more takes off time / n^2 and
// costs a microsecond to wake and to wait for (three steps of nothing: 19 us on
// 16 threads, 30 on 32, 50 on 64), so the best n is the square root of the time
// that one would take. None is woken for a few microseconds of work.
int UsefulWorkers(int threads, double operations, int64_t items);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_WORKERS_H_
