// How a problem is cut into work. What is added to what, and in which order, is
// a pure function of the problem and the engine, never of the number of
// threads, so results are the same bits on any.
#ifndef FA2_SRC_ATTENTION_PLAN_H_
#define FA2_SRC_ATTENTION_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "src/attention/problem.h"
#include "src/attention/waves.h"
#include "src/simd/engine.h"

namespace fa2::attention {

// dQ partials of a head: each is Nq x D in f32, and four keep the workspace
// within six times the size of Q, K, V and dO in bf16.
inline constexpr int64_t kMaxSplits = 4;

// Blocks of one sequence. It is cut into runs of `run` rows, these into blocks
// of `size` rows; the last of each may have fewer.
struct Blocks {
  int64_t rows = 0;
  int64_t size = 1;
  int64_t run = int64_t{1} << 62;  // a multiple of the panel
  int64_t panel = 1;

  int64_t count() const {
    return rows / run * CountOf(run) + CountOf(rows % run);
  }
  int64_t runs() const { return CeilDiv(rows, run); }
  Interval Block(int64_t index) const {
    const int64_t in_run = CountOf(std::min(run, rows));
    const Interval rows_of_run = Run(index / in_run);
    const int64_t begin = rows_of_run.begin + index % in_run * size;
    return {begin, std::min(rows_of_run.end, begin + size)};
  }
  Interval Run(int64_t index) const {
    const int64_t begin = std::min(rows, index * run);
    return {begin, begin + std::min(run, rows - begin)};
  }
  Interval RunBlocks(int64_t index) const {
    const int64_t begin = index * CountOf(std::min(run, rows));
    return {begin, begin + CountOf(Run(index).size())};
  }
  // Rows with the last block padded to whole panels.
  int64_t padded() const { return CeilDiv(rows, panel) * panel; }
  int64_t Padded(const Interval& block) const {
    return CeilDiv(block.size(), panel) * panel;
  }

 private:
  int64_t CountOf(int64_t part) const { return CeilDiv(part, size); }
};

// Block `block` of sequence `sequence`.
struct BlockIndex {
  int32_t sequence;
  int32_t block;
};

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
  // An item works through several heads or sequences: packed keys, dK and dV
  // lie in the workspace of the wave. Otherwise each worker has those of one
  // key block.
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

struct ForwardItem {
  int32_t sequence = 0;
  int32_t head = 0;  // query head
  int32_t block = 0;
  int32_t rank = 0;  // position before sorting
  double cost = 0.0;
};

struct ForwardSequence {
  Blocks queries;
  Blocks keys;
  int64_t wave_k_row = 0;  // of packed keys, in arrays of one head of a wave
  int64_t k_block = 0;     // of all sequences
};

struct ForwardPlan {
  simd::BlockSizes blocks;
  std::vector<ForwardSequence> sequences;
  std::vector<BlockIndex> key_blocks;  // of all sequences
  Waves waves;
  std::vector<ForwardItem> items;  // by wave, then longest first
  int workers = 1;                 // as for BackwardPlan
  int64_t wave_heads = 0;          // kv heads of a wave, at most
  int64_t wave_k_rows = 0;         // and rows of one head
  int64_t k_blocks = 0;            // of all sequences

  // Those of key_blocks that are of a wave's sequences.
  Interval KeyBlocks(const Wave& wave) const {
    const ForwardSequence& last = sequences[wave.sequence_end - 1];
    return {sequences[wave.sequence_begin].k_block,
            last.k_block + last.keys.count()};
  }
};

// For one thread blocks of queries are as large as the engine likes if these
// join.
void PlanForward(const Problem& problem, const simd::Engine& engine,
                 int threads, ForwardPlan* plan);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_PLAN_H_
