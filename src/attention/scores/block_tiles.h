// SPDX-License-Identifier: Apache-2.0

// What the lists of a block mask show of a block pair, whose own sizes follow
// the engine and not the mask: tile states, and where these are mixed the bits
// of all pairs of a query and a key.
#ifndef FA2_SRC_ATTENTION_SCORES_BLOCK_TILES_H_
#define FA2_SRC_ATTENTION_SCORES_BLOCK_TILES_H_

#include <cstdint>

#include "src/attention/call/problem.h"
#include "src/attention/schedule/blocks.h"
#include "src/simd/engine.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

// One worker's buffer. `largest` bounds every block.
class BlockTiles {
 public:
  BlockTiles(const Problem& problem, const simd::BlockSizes& largest,
             threading::ScratchLayout* layout);

  bool given() const { return problem_.blocks.given(); }

  // State of the whole pair. Where it is kPartial, bits() are those of the
  // pair, and `tiles` [key tile][tile_stride] has its states.
  simd::TileState Find(const PairRows& pair, simd::TileState* tiles,
                       int64_t tile_stride);

  // ScoreOptions::visible_bits, with a stride of the pair's padded queries.
  const uint32_t* bits() const { return bits_; }

 private:
  void SetBits(const PairRows& pair);
  void SetTiles(const PairRows& pair, simd::TileState* tiles,
                int64_t tile_stride) const;

  const Problem& problem_;
  uint32_t* bits_ = nullptr;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCORES_BLOCK_TILES_H_
