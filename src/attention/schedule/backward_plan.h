// SPDX-License-Identifier: Apache-2.0

// How the backward is cut into work. What is added to what, and in which order,
// is a pure function of the problem and the engine, never of the number of
// threads, so results are the same bits on any.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_BACKWARD_PLAN_H_
#define FA2_SRC_ATTENTION_SCHEDULE_BACKWARD_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "src/attention/call/problem.h"
#include "src/attention/schedule/backward_cut.h"
#include "src/attention/schedule/blocks.h"
#include "src/attention/schedule/head_batches.h"
#include "src/simd/engine.h"

namespace fa2::attention {

// How the block pairs of a head batch are ordered. In each order dQ of a query
// adds its keys from first to last within a key split, and a partial of dK and
// dV adds query superblocks from last to first, of each one query head after
// another, and of these queries from first to last: every sum has one order,
// whatever the sizes of the blocks in a superblock.
enum class LoopOrder {
  // An item is a key block, with all query heads that share it: it packs K and
  // V, meets all query blocks, and stores dK and dV.
  kKeyOuter,
  // An item is a key block with one split of these query heads, as one of many
  // heads of their own keys would be: K and V are packed before the items, and
  // the splits' partials of dK and dV are summed and stored after them.
  kKeyOuterGroupSplit,
  // One worker meets all key blocks with one query superblock after another,
  // where the queries are too many to come from memory for each key block.
  kQueryOuter,
};

// The key blocks of one key split, from first to last: items that add to the
// same dQ partial. Each begins with the last query superblock, since under a
// causal mask that is one which the next item sees too.
struct KeySplitTask {
  int64_t key_split = 0;
  // The sequences and kv heads that an item works through: one of each, unless
  // they share a dbias, whose elements only one item may add to.
  Interval sequences;
  Interval kv_heads;
  Interval group_splits = {0, 1};  // of each of these heads
  // With bias groups: that of its head batch, and whether this is the last task
  // that adds to it.
  int64_t bias_group = 0;
  bool ends_bias_group = false;
  int32_t rank = 0;   // position before sorting
  double cost = 0.0;  // visible pairs
};

struct BackwardPlan {
  simd::BlockSizes blocks;  // the largest
  std::vector<BackwardSequence> sequences;
  std::vector<BlockId> query_blocks;  // of all sequences, of head 0
  std::vector<BlockId> key_blocks;
  HeadBatches head_batches;
  std::vector<KeySplitTask> tasks;  // by head batch, then longest first
  // What a head batch has at most: kv heads, tasks, items of all of them, and
  // rows of one head.
  struct {
    int64_t heads = 0, tasks = 0, items = 0;
    int64_t q_rows = 0, k_rows = 0, dq_rows = 0;
  } largest_batch;
  // Totals over the sequences, of one head.
  int64_t q_rows = 0;
  int64_t q_blocks = 0, k_blocks = 0, dq_blocks = 0;
  int workers = 1;  // of the threads, as many as the call keeps busy
  // The query heads of a group are cut into splits, each with a partial of dK
  // and dV.
  int64_t group = 1, group_splits = 1;
  LoopOrder order = LoopOrder::kKeyOuter;
  // Packed keys, dK and dV of a whole head batch are kept: an item works
  // through several heads or sequences, or the order wants them. Otherwise each
  // worker keeps those of one key block.
  bool keys_in_batch = false;
  // A worker alone packs a block of queries when it comes to the only block of
  // keys of its head, not all of a head before, and then stores its dQ.
  bool queries_in_turn = false;
  // And takes keys as they lie, where packing would only copy them.
  bool keys_as_they_lie = false;
  // Runs of sequences, in head batches of one head, that sum dbias each for
  // themselves: 0 where it is summed otherwise.
  int64_t bias_groups = 0;

  // Those of query_blocks that are of a head batch's sequences, and of
  // key_blocks.
  Interval QueryBlocks(const HeadBatch& batch) const {
    const BackwardSequence& last = sequences[batch.sequences.end - 1];
    return {sequences[batch.sequences.begin].q_block,
            last.q_block + last.queries.count()};
  }
  Interval KeyBlocks(const HeadBatch& batch) const {
    const BackwardSequence& last = sequences[batch.sequences.end - 1];
    return {sequences[batch.sequences.begin].k_block,
            last.k_block + last.keys.count()};
  }
  // The partials of dK and dV that are kept of each kv head, and the one that a
  // group split adds to: each has its own or, where one item has all splits,
  // there are their sum so far and the next one.
  int64_t dkv_partials() const { return DkvPartial(group_splits - 1) + 1; }
  int64_t DkvPartial(int64_t group_split) const {
    return order == LoopOrder::kKeyOuterGroupSplit
               ? group_split
               : std::min<int64_t>(group_split, 1);
  }
  // The query heads of a group split of a kv head.
  Interval GroupSplitHeads(int64_t kv_head, int64_t group_split) const {
    return {kv_head * group + group_split * group / group_splits,
            kv_head * group + (group_split + 1) * group / group_splits};
  }

  BlockRows QueryRows(const BlockId& id) const {
    return sequences[id.sequence].queries.Rows(id);
  }
  BlockRows KeyRows(const BlockId& id) const {
    return sequences[id.sequence].keys.Rows(id);
  }
  PairRows Rows(const BlockPair& pair) const {
    return {QueryRows(pair.queries), KeyRows(pair.keys)};
  }
};

// What a plan is for, beside the problem.
struct BackwardUse {
  bool share_batch = false;  // dbias sums over it
  bool share_heads = false;
  bool sum_blocks = false;  // dbias may be summed a whole block at a time
  // Results depend on the sizes of blocks: they must not go by the threads.
  bool fixed_blocks = false;
  int threads = 1;

  bool operator==(const BackwardUse& other) const {
    return share_batch == other.share_batch &&
           share_heads == other.share_heads && sum_blocks == other.sum_blocks &&
           fixed_blocks == other.fixed_blocks && threads == other.threads;
  }
};
void PlanBackward(const Problem& problem, const simd::Engine& engine,
                  const BackwardUse& wanted, BackwardPlan* plan);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_BACKWARD_PLAN_H_
