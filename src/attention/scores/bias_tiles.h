// SPDX-License-Identifier: Apache-2.0

// Which tiles of a mask hold anything visible, found by one scan before the
// work starts: padding and block-diagonal masks then cost what their visible
// part costs. A float bias that holds nothing but 0 and -inf is a mask too.
#ifndef FA2_SRC_ATTENTION_SCORES_BIAS_TILES_H_
#define FA2_SRC_ATTENTION_SCORES_BIAS_TILES_H_

#include <cstdint>

#include "src/attention/call/problem.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/mask_scan.h"
#include "src/simd/rowwise/staging.h"
#include "src/threading/scratch_layout.h"
#include "src/threading/team.h"

namespace fa2::attention {

// Scores from (query, key) on in a view of [B or 1, H or 1, Nq or 1, Nk or 1];
// a dimension of 1 is every index.
simd::ScoreMatrix MatrixOf(const ConstTensorView& view, int64_t batch,
                           int64_t head, int64_t query, int64_t key);

// Whether any element of the block is visible.
bool AnyVisible(const simd::ScoreMatrix& bias, const simd::StagedShape& shape);

class BiasTiles {
 public:
  // Takes one byte a tile (N^2 / 512 bytes a distinct plane of the mask). With
  // `wants_gradient` the bias is no mask, whatever it holds.
  BiasTiles(const Problem& problem, bool wants_gradient, int64_t targets,
            threading::ScratchLayout* layout);

  // Whether Scan, of a bias like the problem's, calls no step of the team:
  // there are so few tiles that the leader looks at them itself.
  static bool ScannedByLeader(const Problem& problem);

  // Boolean masks are always scanned; a float bias when several heads share it
  // (a bias of its own for every head is read once a pass anyway, and blocks of
  // -inf are noticed then).
  bool known() const { return states_ != nullptr; }

  void Scan(threading::Team& team);

  // After Scan: whether there is nothing to add, since all elements hide or are
  // 0.
  bool is_mask() const { return is_mask_; }

  // States of the tiles of the queries at `q`, a multiple of the tile size; one
  // for each kTileKeys keys of the sequence. kVisible is only told of masks:
  // another bias must still be added.
  const simd::TileState* Row(int64_t sequence, int64_t head, int64_t q) const;

 private:
  // Calls body(tile_row) for each.
  template <class Body>
  void ForTileRows(threading::Team& team, const Body& body) const;
  // The states of a row of tiles of a mask; false as soon as it turns out to be
  // none.
  bool ScanMask(int64_t tile_row) const;
  // Those of another bias, which is read until it shows something.
  void ScanBias(int64_t tile_row) const;
  // The bias from a row of tiles and a key on, and the queries of the row.
  simd::ScoreMatrix From(int64_t tile_row, int64_t key, int64_t* queries) const;

  const Problem& problem_;
  const simd::MaskScan scan_;  // nullptr: it is no mask
  bool is_mask_ = false;
  int64_t plane_heads_ = 1;
  int64_t planes_ = 0;
  int64_t query_tiles_ = 0;
  int64_t key_tiles_ = 0;
  simd::TileState* states_ = nullptr;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCORES_BIAS_TILES_H_
