// Blocks of rows that sequences are cut into.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_BLOCKS_H_
#define FA2_SRC_ATTENTION_SCHEDULE_BLOCKS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "src/common/integers.h"

namespace fa2::attention {

// dQ partials of a head: each is Nq x D in f32, and four keep the workspace
// within six times the size of Q, K, V and dO in bf16.
inline constexpr int64_t kMaxSplits = 4;
// Partials of dK and dV of a kv head.
inline constexpr int64_t kMaxParts = 16;

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

// Adds the blocks of sequence `sequence` to a list.
void ListBlocks(const Blocks& blocks, size_t sequence,
                std::vector<BlockIndex>* list);

// A block smaller than this does not amortise the calls around it.
inline constexpr int64_t kMinBlock = 64;

// Where the panels of `size` rows of a sequence begin among those of all, if
// `rows` rows and `sequences` sequences come before it and each sequence begins
// with a panel of its own. Of all rows and sequences: how many are needed.
constexpr int64_t PanelsBefore(int64_t rows, int64_t sequences, int64_t size) {
  return rows / size + sequences;
}

// What blocks are multiples of, whose starts must suit both panels and tiles.
int64_t BlockUnit(int64_t panel, int64_t tile);

// The block size for `rows` rows in at least `ranges` ranges.
int64_t FitBlock(int64_t preferred, int64_t rows, int64_t ranges, int64_t unit);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_BLOCKS_H_
