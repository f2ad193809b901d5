// SPDX-License-Identifier: Apache-2.0

// How the forward is cut into work. What is added to what, and in which order,
// is a pure function of the problem and the engine, never of the number of
// threads, so results are the same bits on any.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_FORWARD_PLAN_H_
#define FA2_SRC_ATTENTION_SCHEDULE_FORWARD_PLAN_H_

#include <cstdint>
#include <vector>

#include "src/attention/call/problem.h"
#include "src/attention/schedule/blocks.h"
#include "src/attention/schedule/head_batches.h"
#include "src/simd/engine.h"

namespace fa2::attention {

struct ForwardItem {
  BlockId queries;
  int32_t rank = 0;  // position before sorting
  double cost = 0.0;
};

struct ForwardSequence {
  Blocks queries;
  Blocks keys;
  int64_t batch_k_row =
      0;                // of packed keys, in a head batch's arrays of a head
  int64_t k_block = 0;  // of all sequences
};

struct ForwardPlan {
  simd::BlockSizes blocks;
  std::vector<ForwardSequence> sequences;
  std::vector<BlockId> key_blocks;  // of all sequences
  HeadBatches head_batches;
  std::vector<ForwardItem> items;  // by head batch, then longest first
  int workers = 1;  // of the threads, as many as the call keeps busy
  // What a head batch has at most: kv heads, and rows of one head.
  struct {
    int64_t heads = 0, k_rows = 0;
  } largest_batch;
  int64_t k_blocks = 0;  // of all sequences
  // A worker alone packs a block of keys when the only block of queries of its
  // head comes to it, not all of a head before.
  bool keys_in_turn = false;
  // And where packing would only copy its rows, takes them as they lie.
  bool keys_as_they_lie = false;
  bool k_as_it_lies = false;  // K alone, whoever packs V
  int64_t keys_ahead = 0;     // of the next head, at most, that are read ahead

  // Those of key_blocks that are of a head batch's sequences.
  Interval KeyBlocks(const HeadBatch& batch) const {
    const ForwardSequence& last = sequences[batch.sequences.end - 1];
    return {sequences[batch.sequences.begin].k_block,
            last.k_block + last.keys.count()};
  }
};

// For one thread blocks of queries are as large as the engine likes, if it is
// bitwise block-invariant.
void PlanForward(const Problem& problem, const simd::Engine& engine,
                 int threads, ForwardPlan* plan);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_FORWARD_PLAN_H_
