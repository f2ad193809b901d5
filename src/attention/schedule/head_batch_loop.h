// SPDX-License-Identifier: Apache-2.0

// Who works through the head batches of a plan, in which scratch memory.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_HEAD_BATCH_LOOP_H_
#define FA2_SRC_ATTENTION_SCHEDULE_HEAD_BATCH_LOOP_H_

#include <cstdint>

#include "src/attention/schedule/head_batches.h"
#include "src/threading/team.h"

namespace fa2::attention {

// Gives each of `count` workers its head batch's scratch memory: one of
// `batches`, HeadBatches::in_flight() of them, or nothing while workers is
// null.
template <class BatchScratch, class Worker>
void AssignBatchScratch(const HeadBatches& head_batches, BatchScratch* batches,
                        int count, Worker* workers) {
  for (int i = 0; workers != nullptr && i < count; ++i) {
    workers[i].batch = batches + (head_batches.alone ? i : 0);
  }
}

// Calls run(team, batch) for every head batch, after batch.heads has been set
// to it: the team is the whole one or, where head batches are for one worker,
// that worker alone. `batches` as above.
template <class BatchScratch, class Run>
void ForEachHeadBatch(const HeadBatches& head_batches, threading::Team& team,
                      BatchScratch* batches, const Run& run) {
  if (head_batches.alone) {
    team.For(static_cast<int64_t>(head_batches.list.size()),
             [&](int64_t i, int worker) {
               threading::Team alone(1, worker);
               batches[worker].heads = &head_batches.list[i];
               run(alone, batches[worker]);
             });
    return;
  }
  for (const HeadBatch& heads : head_batches.list) {
    batches[0].heads = &heads;
    run(team, batches[0]);
  }
}

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_HEAD_BATCH_LOOP_H_
