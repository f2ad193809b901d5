// SPDX-License-Identifier: Apache-2.0

// The block pairs of the backward's items, in order.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_BLOCK_PAIRS_H_
#define FA2_SRC_ATTENTION_SCHEDULE_BLOCK_PAIRS_H_

#include <cstdint>

#include "src/attention/schedule/backward_plan.h"
#include "src/attention/schedule/blocks.h"

namespace fa2::attention {

// The pairs of some key blocks with the queries of one group split of a task's
// kv heads, as a list that is computed and not stored. From the outermost
// dimension in: query superblocks from last to first, key blocks, query heads,
// sequences, query blocks of the superblock. The task's sequences are cut
// alike.
class BlockPairs {
 public:
  BlockPairs(const BackwardPlan& plan, const KeySplitTask& task,
             int64_t group_split, Interval key_blocks)
      : plan_(plan),
        queries_(plan.sequences[task.sequences.begin].queries),
        sequences_(task.sequences),
        kv_heads_(task.kv_heads),
        group_split_(group_split),
        key_blocks_(key_blocks),
        split_heads_(
            plan.GroupSplitHeads(task.kv_heads.begin, group_split).size()),
        // Pairs of one query block of a superblock.
        columns_(key_blocks.size() * kv_heads_.size() * split_heads_ *
                 sequences_.size()) {}

  int64_t size() const { return queries_.count() * columns_; }

  BlockPair operator[](int64_t index) const {
    // All superblocks but the last one, which comes first, have as many blocks.
    int64_t superblock = queries_.superblocks() - 1;
    int64_t blocks = queries_.BlocksOf(superblock).size();
    if (index >= blocks * columns_) {
      index -= blocks * columns_;
      blocks = queries_.BlocksOf(0).size();
      superblock -= 1 + index / (blocks * columns_);
      index %= blocks * columns_;
    }
    const auto take = [&index](int64_t count) {
      const int64_t i = index % count;
      index /= count;
      return i;
    };
    BlockPair pair;
    pair.queries.block = queries_.BlocksOf(superblock).begin + take(blocks);
    pair.queries.sequence = sequences_.begin + take(sequences_.size());
    const int64_t head = take(split_heads_);
    pair.keys.head = kv_heads_.begin + take(kv_heads_.size());
    pair.queries.head =
        plan_.GroupSplitHeads(pair.keys.head, group_split_).begin + head;
    pair.keys.sequence = pair.queries.sequence;
    pair.keys.block = key_blocks_.begin + index;
    pair.key_split =
        plan_.sequences[pair.keys.sequence].keys.SuperblockOf(pair.keys.block);
    pair.dkv_partial = plan_.DkvPartial(group_split_);
    return pair;
  }

 private:
  const BackwardPlan& plan_;
  const Blocks& queries_;
  const Interval sequences_, kv_heads_;
  const int64_t group_split_;
  const Interval key_blocks_;
  const int64_t split_heads_;
  const int64_t columns_;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_BLOCK_PAIRS_H_
