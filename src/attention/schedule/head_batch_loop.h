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

// What the worker of a head batch reads ahead beside it: `next`, where that is
// before `end`.
template <class BatchScratch>
void SetReadAhead(const HeadBatches& head_batches, int64_t next, int64_t end,
                  BatchScratch* batch) {
  batch->next = head_batches.read_ahead && next < end ? &head_batches.list[next]
                                                      : nullptr;
}

// Calls run(team, batch) for every head batch, after batch.heads has been set
// to it: the team is the whole one or, where head batches are for one worker,
// that worker alone. batch.next is the one that it reads ahead beside it: that
// which it comes to next, if it takes none from others. `batches` as above.
template <class BatchScratch, class Run>
void ForEachHeadBatch(const HeadBatches& head_batches, threading::Team& team,
                      BatchScratch* batches, const Run& run) {
  const int64_t count = static_cast<int64_t>(head_batches.list.size());
  if (head_batches.alone) {
    const bool runs = head_batches.even();
    team.For(
        count,
        [&](int64_t i, int worker) {
          BatchScratch& batch = batches[worker];
          batch.heads = &head_batches.list[i];
          SetReadAhead(head_batches, i + (runs ? 1 : team.num_threads()),
                       runs ? team.RunEnd(i, count) : count, &batch);
          threading::Team alone(1, worker);
          run(alone, batch);
        },
        runs ? threading::Team::Share::kRun
             : threading::Team::Share::kEveryNth);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    batches[0].heads = &head_batches.list[i];
    SetReadAhead(head_batches, i + 1, count, &batches[0]);
    run(team, batches[0]);
  }
}

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_HEAD_BATCH_LOOP_H_
