// SPDX-License-Identifier: Apache-2.0

// How much of the backward goes to one item: splits of the heads that share
// keys, and blocks and splits of a sequence's keys.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_BACKWARD_CUT_H_
#define FA2_SRC_ATTENTION_SCHEDULE_BACKWARD_CUT_H_

#include <cstdint>

#include "src/attention/call/problem.h"
#include "src/attention/schedule/blocks.h"
#include "src/simd/engine.h"

namespace fa2::attention {

// One sequence of the backward plan. Each key split, a superblock of its keys,
// has a dQ partial of its own.
struct BackwardSequence {
  Blocks queries;
  Blocks keys;
  int64_t key_splits = 1;
  // Row offsets of the sequence in arrays of one head.
  int64_t q_row = 0;  // of all sequences
  // The same in a head batch's arrays of one head.
  int64_t batch_q_row = 0;   // packed query operands, row statistics
  int64_t batch_k_row = 0;   // packed key operands, where items share them
  int64_t batch_dq_row = 0;  // dQ partials: that of key split s is s * padded
                             // queries further
  int64_t q_block = 0;       // per-block flags of queries
  int64_t k_block = 0;       // per-block flags and sums of keys
  int64_t dq_block = 0;      // per-block flags of dQ partials
};

// Splits of the query heads of a group, in a call that is worth `items` items:
// where few heads have keys of their own and blocks may be as large as the work
// allows, since what works on one split shares little with what works on the
// others.
int64_t GroupSplits(const Problem& problem, const simd::Engine& engine,
                    int64_t items);

// Cuts one sequence of `pairs` visible pairs. Each of the `group_splits` of a
// kv head is to get `wanted` key blocks; `workers` is its share of them. All
// but the sizes of blocks follows without the latter, and these too with
// fixed_blocks. Leaves the row offsets alone.
void CutSequence(const Problem& problem, const simd::Engine& engine,
                 const Sequence& sequence, double pairs, int64_t group_splits,
                 int64_t wanted, int64_t workers, bool fixed_blocks,
                 BackwardSequence* s);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_BACKWARD_CUT_H_
