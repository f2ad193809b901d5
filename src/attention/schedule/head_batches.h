// SPDX-License-Identifier: Apache-2.0

// Head batches: how the heads and sequences of a problem go through the
// workspace.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_HEAD_BATCHES_H_
#define FA2_SRC_ATTENTION_SCHEDULE_HEAD_BATCHES_H_

#include <cstdint>
#include <vector>

#include "src/attention/call/problem.h"

namespace fa2::attention {

// Heads of some sequences that are worked through together: by all workers, one
// head batch after the other, or, where there are enough of them, by one worker
// each, who then finds in its caches what it packed, and waits for nobody.
struct HeadBatch {
  Interval kv_heads;
  Interval sequences;
  Interval items;     // of the plan's list of tasks or items
  double cost = 0.0;  // visible pairs
};

struct HeadBatches {
  std::vector<HeadBatch> list;
  bool alone = false;  // a worker each, longest first
  // Whether a worker that has them to itself reads what it packs next, the next
  // one among it, beside what it computes.
  bool read_ahead = false;
  // Of `all` threads those that work at one head batch.
  int threads(int all) const { return alone ? 1 : all; }
  // Whether all take as long, in a list that is sorted.
  bool even() const {
    return list.empty() || list.front().cost == list.back().cost;
  }
  // How many are worked through at a time, each in scratch memory of its own.
  int in_flight(int workers) const { return alone ? workers : 1; }
};

// Items that a head batch is to have for each thread. The forward, which gains
// less by head batches, wants more.
inline constexpr double kBackwardBatchItems = 4.0;
inline constexpr double kForwardBatchItems = 16.0;
// Operations of a short head: some 60 us of a core on lanes, 15 on AMX. Of the
// forward, which has fewer steps to wait in, four times as many (16 threads, 16
// heads of 256 tokens, D 160, bf16: 253 -> 161 us; 32 of four times 128, D 128:
// 401 -> 271, f32 1,039 -> 903).
inline constexpr double kShortBackwardHead = 12e6;
inline constexpr double kShortForwardHead = 50e6;

// The least that a head batch of `threads` threads is to have of a call that
// has so many operations and, in each of `splits` splits of a kv head's group,
// so many items, `wanted_items` of which each thread is to get: in kv heads
// with all of their sequences, so that less than 1 is a part of the sequences.
double LeastHeadBatch(const Problem& problem, double operations, int threads,
                      double wanted_items, int64_t items, int64_t splits);

// Whether `threads` threads are to take a head of a sequence each, and then the
// next: where that leaves none of them idle for long. `pairs`: visible ones of
// all sequences; `operations`: of the call; `short_head`: what a short head has
// of them at most; `whole`: a head is one item anyway.
bool TakeHeadsAlone(const Problem& problem, const simd::Engine& engine,
                    double pairs, double operations, double short_head,
                    bool whole, int threads);

// HeadBatches::read_ahead of a call of so many workers.
bool ReadsAhead(const Problem& problem, const simd::Engine& engine,
                const HeadBatches& batches, int workers);

// Adds the head batches of a problem of so many visible pairs to an empty list,
// of at least `least` each, see LeastHeadBatch, and as equal as may be.
void CutHeadBatches(const Problem& problem, double pairs, double least,
                    std::vector<HeadBatch>* batches);

// The longest first, where they are for one worker each. Their tasks or items
// have been listed.
void SortAlone(HeadBatches* batches);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_HEAD_BATCHES_H_
