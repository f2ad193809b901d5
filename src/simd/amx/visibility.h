// SPDX-License-Identifier: Apache-2.0

// Visibility of 32 keys x 32 queries, the unit of the AMX engines, from the
// drivers' tiles of 16 keys.
#ifndef FA2_SRC_SIMD_AMX_VISIBILITY_H_
#define FA2_SRC_SIMD_AMX_VISIBILITY_H_

#include <cstdint>

#include "src/simd/engine.h"

namespace fa2::simd {

struct SubBlock {
  TileState half[2];  // the 16-key tiles
  // Hidden, but with visible sub-blocks on both sides along its keys or its
  // queries, so that products run through it.
  bool between;

  bool hidden() const {
    return half[0] == TileState::kHidden && half[1] == TileState::kHidden;
  }
  bool visible() const {
    return half[0] == TileState::kVisible && half[1] == TileState::kVisible;
  }
};

// Those of a block, [keys][queries] in panels.
struct SubBlockMap {
  SubBlock* first = nullptr;
  int64_t queries = 0;
  SubBlock& At(int64_t key, int64_t query) const {
    return first[key * queries + query];
  }

  // What is left of panels [begin, end) without the hidden ones at either end.
  struct Range {
    int64_t begin, end;
  };
  Range SeenKeys(int64_t query, Range keys) const {
    return Seen(first + query, queries, keys);
  }
  Range SeenQueries(int64_t key) const {
    return Seen(first + key * queries, 1, {0, queries});
  }

 private:
  static Range Seen(const SubBlock* line, int64_t stride, Range range) {
    const auto hidden = [=](int64_t i) { return line[i * stride].hidden(); };
    while (range.begin < range.end && hidden(range.begin)) ++range.begin;
    while (range.begin < range.end && hidden(range.end - 1)) --range.end;
    return range;
  }
};

// Fills the map of a block.
inline void ClassifySubBlocks(const Block& block, const SubBlockMap& map) {
  const int64_t keys = block.keys / 32;
  const int64_t queries = map.queries;
  for (int64_t k = 0; k < keys; ++k) {
    for (int64_t q = 0; q < queries; ++q) {
      SubBlock& s = map.At(k, q);
      s.between = false;
      for (int half = 0; half < 2; ++half) {
        s.half[half] =
            block.tiles == nullptr
                ? TileState::kVisible
                : block.tiles[(2 * k + half) * block.tile_stride + q];
      }
    }
  }
  if (block.tiles == nullptr) return;
  const auto mark = [](SubBlock& s) {
    if (s.hidden()) s.between = true;
  };
  for (int64_t k = 0; k < keys; ++k) {
    const SubBlockMap::Range seen = map.SeenQueries(k);
    for (int64_t q = seen.begin; q < seen.end; ++q) mark(map.At(k, q));
  }
  for (int64_t q = 0; q < queries; ++q) {
    const SubBlockMap::Range seen = map.SeenKeys(q, {0, keys});
    for (int64_t k = seen.begin; k < seen.end; ++k) mark(map.At(k, q));
  }
}

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_AMX_VISIBILITY_H_
