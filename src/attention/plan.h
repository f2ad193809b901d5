// How a problem is cut into work. What is added to what, and in which order, is
// a pure function of the problem and the engine, never of the number of
// threads, so results are the same bits on any.
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
// phases ranges, its query blocks into `phases` ranges. In phase p range j of a
// split takes query range (p - j) mod phases: within a split no two ranges of a
// phase share query rows, so they add to one dQ buffer of the split without
// meeting, and every phase ends before the next begins.
//
// Many narrow ranges fill many cores, but every range reads all of Q and dO,
// and in every phase its own K, V, dK and dV anew. So on few threads `group`
// neighbouring ranges make one item, whose blocks may hold several ranges and
// meet several query ranges in turn. Sums keep their order: in step m the group
// of ranges [j0, j0 + group) takes the `group` query ranges up to m group - j0,
// ranges of a phase before 0 or after the last left out, where range j meets a
// query range after range j - 1 has, and after its own phase before, as in
// phases.
struct BackwardSequence {
  Blocks queries;
  Blocks keys;
  int64_t splits = 1;
  int64_t phases = 1;
  // Keys of a range where ranges may be grouped: a block before they are, or
  // several; else 0.
  int64_t range_keys = 0;
  int64_t group = 1;  // divides phases
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

  // Rounds of items, each of which ends before the next begins.
  int64_t steps() const { return phases / group + (group > 1 ? 1 : 0); }
  int64_t groups() const { return phases / group; }
};

struct BackwardItem {
  int32_t step = 0;
  int32_t split = 0;
  int32_t group = 0;  // of ranges
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
  // Heads are worked through in waves, which use the same part of the workspace
  // one after the other.
  int64_t waves = 0;
  int64_t wave_heads = 0;           // kv heads of a wave
  int64_t steps = 0;                // of a wave
  std::vector<BackwardItem> items;  // by wave, by step, then longest first
  std::vector<int64_t> step_begin;  // into items; of every wave, and the end
  // Totals over the sequences, of one head.
  int64_t q_rows = 0, k_rows = 0, dq_rows = 0;
  int64_t q_blocks = 0, k_blocks = 0, dq_blocks = 0, parts = 0;
  // dK and dV live in the workspace from step to step (or item to item);
  // otherwise each item keeps those of one key block to itself.
  bool shared_key_gradients = false;
};

// What a plan is for, beside the problem.
struct BackwardUse {
  bool share_batch = false;  // dbias sums over it
  bool share_heads = false;
  bool score_gradients = false;  // dbias or the slopes' gradient is wanted:
                                 // sums of their own, by range
  int threads = 1;
};
void PlanBackward(const Problem& problem, const simd::Engine& engine,
                  const BackwardUse& use, BackwardPlan* plan);

// Calls visit(key block, its keys that count, query range) for all that an item
// works through, in order.
template <class Visit>
void ForEachCell(const BackwardSequence& s, const BackwardItem& item,
                 const Visit& visit) {
  if (s.range_keys == 0) {
    const BlockRange keys =
        RangeOf(item.split * s.phases + item.group, s.splits * s.phases,
                s.keys.count(), s.fold_keys);
    const int64_t queries = (item.step - item.group + s.phases) % s.phases;
    for (const Interval& run : keys.runs) {
      for (int64_t block = run.begin; block < run.end; ++block) {
        visit(block, s.keys.Block(block), queries);
      }
    }
    return;
  }
  const int64_t j0 = item.group * s.group;
  const int64_t row0 = (item.split * s.phases + j0) * s.range_keys;
  const int64_t end = std::min(s.keys.rows, row0 + s.group * s.range_keys);
  for (int64_t row = row0; row < end; row += s.keys.size) {
    const int64_t block = row / s.keys.size;
    const Interval keys = s.keys.Block(block);
    // Ranges of the block, in the split.
    const int64_t first = j0 + (row - row0) / s.range_keys;
    const int64_t last =
        first + std::max<int64_t>(1, s.keys.size / s.range_keys);
    for (int64_t c = 0; c < s.group; ++c) {
      const int64_t query = (item.step - 1) * s.group + 1 + c - j0;
      const int64_t begin = std::max(first, -query);
      const int64_t stop = std::min(last, s.phases - query);
      const Interval shown = {
          std::min(keys.end, keys.begin + (begin - first) * s.range_keys),
          std::min(keys.end, keys.begin + (stop - first) * s.range_keys)};
      if (begin >= stop || shown.empty()) continue;
      visit(block, shown, (query + s.phases) % s.phases);
    }
  }
}

// The step in which the item of a key block visits it for the last time. The
// first is 0.
inline int64_t LastStep(const BackwardSequence& s, const BackwardItem& item,
                        int64_t block) {
  if (s.range_keys == 0) return s.phases - 1;
  // The block's first range goes on for longest.
  const int64_t range =
      block * s.keys.size / s.range_keys - item.split * s.phases;
  const int64_t before = range - item.group * s.group;
  return (s.phases - 1 - before + s.group - 1) / s.group;
}

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
  std::vector<ForwardItem> items;      // longest first, see PlanForward
  int64_t k_rows = 0, k_blocks = 0;
};

// For one thread items go head by head, whose K and V then stay in its caches.
void PlanForward(const Problem& problem, const simd::Engine& engine,
                 int threads, ForwardPlan* plan);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_PLAN_H_
