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
#include "src/attention/schedule/waves.h"
#include "src/simd/engine.h"

namespace fa2::attention {

// The key blocks of one split, from first to last: work items that add to the
// same dQ partial. Each meets the runs of query blocks from last to first,
// since under a causal mask it then begins with those that the next one sees
// too; of a run one query head after another, its blocks from first to last. So
// every sum has one order, whatever the sizes of the blocks in a run: dQ of a
// query adds its keys from first to last, a partial of dK and dV of a key adds
// runs, heads and queries as told.
struct BackwardChain {
  int32_t split = 0;
  // The sequences and kv heads that an item works through: one of each, unless
  // they share a dbias, whose elements only one item may add to.
  int32_t sequence_begin = 0, sequence_end = 0;
  int32_t head_begin = 0, head_end = 0;
  int32_t part_begin = 0, part_end = 1;  // of each of these heads
  int32_t rank = 0;                      // position before sorting
  double cost = 0.0;                     // visible pairs
};

struct BackwardPlan {
  simd::BlockSizes blocks;  // the largest
  std::vector<BackwardSequence> sequences;
  std::vector<BlockIndex> query_blocks;  // of all sequences
  std::vector<BlockIndex> key_blocks;
  Waves waves;
  std::vector<BackwardChain> chains;  // by wave, then longest first
  // What a wave has at most: kv heads, chains, items of all of them, and rows
  // of one head.
  int64_t wave_heads = 0, wave_chains = 0, wave_items = 0;
  int64_t wave_q_rows = 0, wave_k_rows = 0, wave_dq_rows = 0;
  // Totals over the sequences, of one head.
  int64_t q_rows = 0;
  int64_t q_blocks = 0, k_blocks = 0, dq_blocks = 0;
  int workers = 1;  // of the threads, as many as the call keeps busy
  // The query heads of a group are cut into parts, each with a partial of dK
  // and dV.
  int64_t group = 1, parts = 1;
  // An item works through one part, as one of many heads of their own keys
  // would be worked through: keys are packed before the items, and dK and dV
  // are stored after them. Otherwise an item has all parts, one after another.
  bool by_parts = false;
  // A wave's one worker meets all key blocks with one run of queries after
  // another, instead of all queries with one key block (an item) after another.
  bool by_queries = false;
  // An item works through several heads or sequences, or by_queries, or
  // by_parts: packed keys, dK and dV lie in the workspace of the wave.
  // Otherwise each worker has those of one key block.
  bool shared_keys = false;

  // Those of query_blocks that are of a wave's sequences, and of key_blocks.
  Interval QueryBlocks(const Wave& wave) const {
    const BackwardSequence& last = sequences[wave.sequence_end - 1];
    return {sequences[wave.sequence_begin].q_block,
            last.q_block + last.queries.count()};
  }
  Interval KeyBlocks(const Wave& wave) const {
    const BackwardSequence& last = sequences[wave.sequence_end - 1];
    return {sequences[wave.sequence_begin].k_block,
            last.k_block + last.keys.count()};
  }
  // The partials of dK and dV that are kept of each kv head, and where a part
  // adds: all of them or, when an item has all parts, their sum so far and the
  // next one.
  int64_t slots() const { return by_parts ? parts : Slot(parts - 1) + 1; }
  int64_t Slot(int64_t part) const {
    return by_parts ? part : std::min<int64_t>(part, 1);
  }
  // The query heads of a part of a kv head.
  Interval PartHeads(int64_t kv_head, int64_t part) const {
    return {kv_head * group + part * group / parts,
            kv_head * group + (part + 1) * group / parts};
  }
};

// What a plan is for, beside the problem.
struct BackwardUse {
  bool share_batch = false;  // dbias sums over it
  bool share_heads = false;
  // Results depend on the sizes of blocks: they must not go by the threads.
  bool fixed_blocks = false;
  int threads = 1;
};
void PlanBackward(const Problem& problem, const simd::Engine& engine,
                  const BackwardUse& use, BackwardPlan* plan);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_BACKWARD_PLAN_H_
