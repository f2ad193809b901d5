// How a problem is cut into work: a pure function of the problem and the
// engine, never of the number of threads, so results are the same bits on any.
#ifndef FA2_SRC_ATTENTION_PLAN_H_
#define FA2_SRC_ATTENTION_PLAN_H_

#include <cstdint>
#include <vector>

#include "src/attention/problem.h"
#include "src/simd/engine.h"

namespace fa2::attention {

// dQ partials of a head: each is Nq x D in f32, and four keep the workspace
// within six times the size of Q, K, V and dO in bf16.
inline constexpr int64_t kMaxSplits = 4;

// Blocks of one sequence, all `size` rows long but the last.
struct Blocks {
  int64_t rows = 0;
  int64_t size = 1;
  int64_t panel = 1;

  int64_t count() const { return (rows + size - 1) / size; }
  Interval Block(int64_t index) const {
    return {index * size, std::min(rows, (index + 1) * size)};
  }
  // Rows with the last block padded to whole panels.
  int64_t padded() const { return (rows + panel - 1) / panel * panel; }
  int64_t Padded(const Interval& block) const {
    return (block.size() + panel - 1) / panel * panel;
  }
};

// Block `block` of sequence `sequence`.
struct BlockIndex {
  int32_t sequence;
  int32_t block;
};

// A set of blocks that one work item owns: up to two runs. Under a causal mask
// a run is paired with its mirror image, so that every pair of a key range and
// a query range holds the same number of visible tiles.
struct BlockRange {
  Interval runs[2];
};

// Range `index` of `ranges` over `count` blocks; folded: run `index` of
// 2 * ranges and its mirror.
BlockRange RangeOf(int64_t index, int64_t ranges, int64_t count, bool folded);

// One sequence of the backward plan. Its key blocks are cut into splits x
// phases ranges, its query blocks into `phases` ranges. In phase p the item
// (split s, range j) takes query range (j + p) mod phases: within a split no
// two items of a phase share query rows, so they add to one dQ buffer of the
// split without meeting, and every phase ends before the next begins.
struct BackwardSequence {
  Blocks queries;
  Blocks keys;
  int64_t splits = 1;
  int64_t phases = 1;
  bool fold_queries = false;
  bool fold_keys = false;
  // Row offsets of the sequence in arrays of one head.
  int64_t q_row = 0;     // packed query operands, row statistics
  int64_t k_row = 0;     // packed key operands
  int64_t dq_row = 0;    // dQ partials: split s at dq_row + s * padded queries
  int64_t q_block = 0;   // per-block flags of queries
  int64_t k_block = 0;   // per-block flags of keys
  int64_t dq_block = 0;  // per-block flags of dQ partials
  int64_t part = 0;      // sums of key ranges
};

struct BackwardItem {
  int32_t phase = 0;
  int32_t split = 0;
  int32_t range = 0;
  // The sequences and kv heads that the item works through: one of each,
  // unless they share a dbias, whose elements only one item may add to.
  int32_t sequence_begin = 0, sequence_end = 0;
  int32_t head_begin = 0, head_end = 0;
  int32_t rank = 0;  // position before sorting
  double cost = 0.0;
};

struct BackwardPlan {
  simd::BlockSizes blocks;
  std::vector<BackwardSequence> sequences;
  std::vector<BlockIndex> query_blocks;  // of all sequences
  std::vector<BlockIndex> key_blocks;
  std::vector<BackwardItem> items;   // by phase, then longest first
  std::vector<int64_t> phase_begin;  // into items; one more than phases
  // Totals over the sequences, of one head.
  int64_t q_rows = 0, k_rows = 0, dq_rows = 0;
  int64_t q_blocks = 0, k_blocks = 0, dq_blocks = 0, parts = 0;
  // dK and dV live in the workspace from phase to phase (or item to item);
  // otherwise each item keeps those of one key block to itself.
  bool shared_key_gradients = false;
};

// `share_batch`, `share_heads`: dbias sums over them.
void PlanBackward(const Problem& problem, const simd::Engine& engine,
                  bool share_batch, bool share_heads, BackwardPlan* plan);

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
  int64_t k_row = 0;
  int64_t k_block = 0;
};

struct ForwardPlan {
  simd::BlockSizes blocks;
  std::vector<ForwardSequence> sequences;
  std::vector<BlockIndex> key_blocks;  // of all sequences
  std::vector<ForwardItem> items;      // longest first
  int64_t k_rows = 0, k_blocks = 0;
};

void PlanForward(const Problem& problem, const simd::Engine& engine,
                 ForwardPlan* plan);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_PLAN_H_
