// How the backward is cut into work. What is added to what, and in which order,
// is a pure function of the problem and the engine, never of the number of
// threads, so results are the same bits on any.
#ifndef FA2_SRC_ATTENTION_BACKWARD_PLAN_H_
#define FA2_SRC_ATTENTION_BACKWARD_PLAN_H_

#include <cstdint>
#include <vector>

#include "src/attention/blocks.h"
#include "src/attention/problem.h"
#include "src/attention/waves.h"
#include "src/simd/engine.h"

namespace fa2::attention {

// One sequence of the backward plan. Each split, a run of its key blocks, has a
// dQ partial of its own.
struct BackwardSequence {
  Blocks queries;
  Blocks keys;
  int64_t splits = 1;
  // Row offsets of the sequence in arrays of one head.
  int64_t q_row = 0;  // of all sequences
  // The same in arrays of a wave.
  int64_t wave_q_row = 0;   // packed query operands, row statistics
  int64_t wave_k_row = 0;   // packed key operands, where items share them
  int64_t wave_dq_row = 0;  // dQ partials: split s at that + s * padded queries
  int64_t q_block = 0;      // per-block flags of queries
  int64_t k_block = 0;      // per-block flags and sums of keys
  int64_t dq_block = 0;     // per-block flags of dQ partials
};

// The key blocks of one split, from first to last: work items that add to the
// same dQ partial. Each meets the runs of query blocks from last to first,
// since under a causal mask it then begins with those that the next one sees
// too; of a run one query head after another, its blocks from first to last. So
// every sum has one order, whatever the sizes of the blocks in a run: dQ of a
// query adds its keys from first to last, dK and dV of a key add runs, heads
// and queries as told.
struct BackwardChain {
  int32_t split = 0;
  // The sequences and kv heads that an item works through: one of each, unless
  // they share a dbias, whose elements only one item may add to.
  int32_t sequence_begin = 0, sequence_end = 0;
  int32_t head_begin = 0, head_end = 0;
  int32_t rank = 0;   // position before sorting
  double cost = 0.0;  // visible pairs
};

struct BackwardPlan {
  simd::BlockSizes blocks;  // the largest
  std::vector<BackwardSequence> sequences;
  std::vector<BlockIndex> query_blocks;  // of all sequences
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
  // A wave's one worker meets all key blocks with one run of queries after
  // another, instead of all queries with one key block (an item) after another.
  bool by_queries = false;
  // An item works through several heads or sequences, or by_queries: packed
  // keys, dK and dV lie in the workspace of the wave. Otherwise each worker has
  // those of one key block.
  bool shared_keys = false;

  // Those of query_blocks that are of a wave's sequences.
  Interval QueryBlocks(const Wave& wave) const {
    const BackwardSequence& last = sequences[wave.sequence_end - 1];
    return {sequences[wave.sequence_begin].q_block,
            last.q_block + last.queries.count()};
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

#endif  // FA2_SRC_ATTENTION_BACKWARD_PLAN_H_
