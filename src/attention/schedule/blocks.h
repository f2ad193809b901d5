// SPDX-License-Identifier: Apache-2.0

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
inline constexpr int64_t kMaxKeySplits = 4;
// Splits of the query heads that share a kv head, each with a partial of dK and
// dV.
inline constexpr int64_t kMaxGroupSplits = 16;

// A block of rows of one head: queries of a query head, or keys of a kv head.
struct BlockId {
  int64_t sequence = 0;
  int64_t head = 0;
  int64_t block = 0;
};

// Where its rows lie.
struct BlockRows {
  int64_t sequence = 0;
  int64_t head = 0;
  Interval rows;       // of the sequence
  int64_t padded = 0;  // their number, padded to whole panels

  int64_t begin() const { return rows.begin; }
  int64_t size() const { return rows.size(); }
};

// A block of queries that meets a block of keys, and the partials that it adds
// to.
struct BlockPair {
  BlockId queries;
  BlockId keys;
  int64_t key_split = 0;    // of dQ
  int64_t dkv_partial = 0;  // of dK and dV
};

struct PairRows {
  BlockRows queries;
  BlockRows keys;
};

// Blocks of one sequence. It is cut into superblocks of `superblock` rows,
// these into blocks of `size` rows; the last of each may have fewer.
struct Blocks {
  int64_t rows = 0;
  int64_t size = 1;
  int64_t superblock = int64_t{1} << 62;  // a multiple of the panel
  int64_t panel = 1;

  int64_t count() const {
    return rows / superblock * CountOf(superblock) + CountOf(rows % superblock);
  }
  int64_t superblocks() const { return CeilDiv(rows, superblock); }
  Interval Block(int64_t index) const {
    // Short sequences are one block, and the time of their calls counts.
    if (rows <= std::min(size, superblock)) return {0, rows};
    const int64_t blocks = CountOf(std::min(superblock, rows));
    const Interval within = Superblock(index / blocks);
    const int64_t begin = within.begin + index % blocks * size;
    return {begin, std::min(within.end, begin + size)};
  }
  Interval Superblock(int64_t index) const {
    const int64_t begin = std::min(rows, index * superblock);
    return {begin, begin + std::min(superblock, rows - begin)};
  }
  // The blocks of a superblock, and the superblock of a block.
  Interval BlocksOf(int64_t index) const {
    const int64_t begin = index * CountOf(std::min(superblock, rows));
    return {begin, begin + CountOf(Superblock(index).size())};
  }
  int64_t SuperblockOf(int64_t block) const {
    return block / CountOf(std::min(superblock, rows));
  }
  // Rows with the last block padded to whole panels.
  int64_t padded() const { return CeilDiv(rows, panel) * panel; }
  int64_t Padded(const Interval& block) const {
    return CeilDiv(block.size(), panel) * panel;
  }
  BlockRows Rows(const BlockId& id) const {
    const Interval block = Block(id.block);
    return {id.sequence, id.head, block, Padded(block)};
  }

 private:
  int64_t CountOf(int64_t rows_of_part) const {
    return CeilDiv(rows_of_part, size);
  }
};

// Adds the blocks of sequence `sequence`, of head 0, to a list.
void ListBlocks(const Blocks& blocks, size_t sequence,
                std::vector<BlockId>* list);

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
