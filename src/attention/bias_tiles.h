// Which tiles of a mask hold anything visible, found by one scan before the
// work starts: padding and block-diagonal masks then cost what their visible
// part costs.
#ifndef FA2_SRC_ATTENTION_BIAS_TILES_H_
#define FA2_SRC_ATTENTION_BIAS_TILES_H_

#include <cstdint>

#include "src/attention/problem.h"
#include "src/attention/scratch.h"
#include "src/simd/engine.h"
#include "src/simd/staging.h"
#include "src/threading/parallel.h"

namespace fa2::attention {

// Whether any element of the block is visible.
bool AnyVisible(const simd::ScoreMatrix& bias, const simd::StagedShape& shape);

class BiasTiles {
 public:
  // Takes one byte a tile (N^2 / 512 bytes a distinct plane of the mask).
  BiasTiles(const Problem& problem, Carver* carver);

  // Boolean masks are always scanned; a float bias when several heads share it
  // (a bias of its own for every head is read once a pass anyway, and blocks of
  // -inf are noticed then).
  bool known() const { return states_ != nullptr; }
  bool wanted() const { return wanted_; }

  void Scan(threading::Team& team);

  // State of the tile at query `q`, key `k` (multiples of the tile size).
  // kVisible is only told of boolean masks: a float bias must still be added.
  simd::TileState State(int64_t sequence, int64_t head, int64_t q,
                        int64_t k) const;

  // Whether a boolean mask hides nothing of the block.
  bool AllVisible(int64_t sequence, int64_t head, Interval queries,
                  Interval keys) const;

 private:
  simd::TileState ScanTile(int64_t plane, int64_t query_tile,
                           int64_t key_tile) const;

  const Problem& problem_;
  bool wanted_ = false;
  int64_t plane_heads_ = 1;
  int64_t planes_ = 0;
  int64_t query_tiles_ = 0;
  int64_t key_tiles_ = 0;
  simd::TileState* states_ = nullptr;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_BIAS_TILES_H_
