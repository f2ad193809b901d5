// Visibility of 32 keys x 32 queries, the unit of the AMX engines, from the
// drivers' tiles of 16 keys.
#ifndef FA2_SRC_SIMD_AMX_VISIBILITY_H_
#define FA2_SRC_SIMD_AMX_VISIBILITY_H_

#include <cmath>
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

// Writes [block.keys / 32][queries] sub-blocks; queries = block.queries / 32.
inline void ClassifySubBlocks(const Block& block, int64_t queries,
                              SubBlock* sub_blocks) {
  const int64_t keys = block.keys / 32;
  for (int64_t k = 0; k < keys; ++k) {
    for (int64_t q = 0; q < queries; ++q) {
      SubBlock& s = sub_blocks[k * queries + q];
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
  // Marks the hidden ones between the first and the last visible one of `n`.
  const auto mark = [sub_blocks](int64_t first, int64_t step, int64_t n) {
    int64_t begin = 0, end = n;
    while (begin < end && sub_blocks[first + begin * step].hidden()) ++begin;
    while (begin < end && sub_blocks[first + (end - 1) * step].hidden()) --end;
    for (int64_t i = begin; i < end; ++i) {
      SubBlock& s = sub_blocks[first + i * step];
      if (s.hidden()) s.between = true;
    }
  };
  for (int64_t k = 0; k < keys; ++k) mark(k * queries, 1, queries);
  for (int64_t q = 0; q < queries; ++q) mark(q, queries, keys);
}

// Ranges of 32 queries that see all keys; from end to end, of none.
struct AllKeys {
  constexpr AllKeys() {
    for (float& x : begin) x = -HUGE_VALF;
    for (float& x : end) x = HUGE_VALF;
  }
  float begin[32] = {};
  float end[32] = {};
};
inline constexpr AllKeys kAllKeys;

// The keys that the 32 queries of panel `query` see of each half of a
// sub-block: [begin, end), in rows of the block.
inline void VisibleRanges(const SubBlock& sub, const ScoreOptions& o,
                          int64_t query, const float* begin[2],
                          const float* end[2]) {
  for (int half = 0; half < 2; ++half) {
    begin[half] =
        sub.half[half] == TileState::kHidden ? kAllKeys.end : kAllKeys.begin;
    end[half] = kAllKeys.end;
    if (sub.half[half] == TileState::kPartial) {
      begin[half] = static_cast<const float*>(o.visible_begin) + 32 * query;
      end[half] = static_cast<const float*>(o.visible_end) + 32 * query;
    }
  }
}

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_AMX_VISIBILITY_H_
