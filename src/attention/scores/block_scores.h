// SPDX-License-Identifier: Apache-2.0

// What the scores of one block need beside Q and K: tile states, visible
// intervals, positions, staged bias and dropout. Forward and backward share it.
#ifndef FA2_SRC_ATTENTION_SCORES_BLOCK_SCORES_H_
#define FA2_SRC_ATTENTION_SCORES_BLOCK_SCORES_H_

#include <cstdint>
#include <optional>

#include "src/attention/call/problem.h"
#include "src/attention/schedule/blocks.h"
#include "src/attention/scores/alibi_reach.h"
#include "src/attention/scores/bias_tiles.h"
#include "src/attention/scores/block_tiles.h"
#include "src/attention/scores/staged_bias.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/staging.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

// How arrays of the scores of a block pair are staged.
simd::StagedShape StagedShapeOf(const PairRows& pair,
                                const simd::Engine& engine);

// One worker's buffers. `largest` bounds every block.
class BlockScores {
 public:
  BlockScores(const Problem& problem, const simd::Engine& engine,
              const simd::StagingKernels& staging, const BiasTiles& bias_tiles,
              const AlibiReach& alibi_reach, const simd::BlockSizes& largest,
              bool want_alibi_gradient, threading::ScratchLayout* layout);

  // Fills everything of `block` but the operands and the engine's scratch;
  // false when no element is visible. The bias of `next`, the pair that the
  // worker comes to next (empty: none), is prefetched meanwhile.
  bool Prepare(const PairRows& pair, const PairRows& next, simd::Block* block);

 private:
  template <typename T>
  bool PrepareAs(const PairRows& pair, const PairRows& next,
                 simd::Block* block);

  // The bias is a mask, which the engine reads where tiles are kPartial.
  bool MasksByTiles() const {
    return engine_.streams_scores && bias_tiles_.is_mask();
  }

  // What `next` will stage of its bias.
  simd::PrefetchRows BiasAhead(const PairRows& next) const;

  // What the tiles of a block are.
  struct TileSum {
    bool all_visible = true;
    bool hidden = true;         // all of them
    bool some_by_bias = false;  // bias, or a mask, is to be looked at
  };
  // `in_range`: every query sees all keys, but for bias. `reach_ends`:
  // AlibiReach may hide some. `listed`: tiles_ has what a block mask makes of
  // them.
  TileSum FindTiles(const PairRows& pair, bool in_range, bool reach_ends,
                    bool listed);

  const Problem& problem_;
  const simd::Engine& engine_;
  const simd::StagingKernels& staging_;
  const BiasTiles& bias_tiles_;
  const AlibiReach& alibi_reach_;
  BlockTiles block_tiles_;
  bool positions_;
  int64_t tile_stride_;
  simd::TileState* tiles_;
  void* visible_begin_;
  void* visible_end_;
  void* position_;
  std::optional<StagedBias> bias_;
  void* dropout_ = nullptr;
  bool stream_dropout_;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCORES_BLOCK_SCORES_H_
