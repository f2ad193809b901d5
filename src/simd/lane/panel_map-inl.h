// SPDX-License-Identifier: Apache-2.0

// Which parts of a block of keys x queries are visible, in panels of queries.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_PANEL_MAP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_PANEL_MAP_INL_H_
#undef FA2_SRC_SIMD_LANE_PANEL_MAP_INL_H_
#else
#define FA2_SRC_SIMD_LANE_PANEL_MAP_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/engine.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

// Half-open range of rows, columns or panels.
struct Range {
  size_t begin = 0;
  size_t end = 0;
  bool empty() const { return begin >= end; }
};

// Which parts of a block are visible, in units of (16 keys, one panel).
class PanelMap {
 public:
  PanelMap(const Block& block, size_t panel_width, size_t key_step)
      : block_(block),
        width_(panel_width),
        keys_(static_cast<size_t>(
            block.CountedKeys(static_cast<int64_t>(key_step)))),
        queries_(static_cast<size_t>(block.queries)),
        groups_((keys_ + kTileKeys - 1) / kTileKeys),
        panels_((queries_ + panel_width - 1) / panel_width) {}

  // Those that count.
  size_t keys() const { return keys_; }
  size_t groups() const { return groups_; }
  size_t panels() const { return panels_; }
  // Columns of a panel, of which the last may have fewer.
  size_t Width(size_t panel) const {
    return std::min(width_, queries_ - panel * width_);
  }

  TileState State(size_t group, size_t panel) const {
    if (block_.tiles == nullptr) return TileState::kVisible;
    const size_t first = panel * width_ / kTileQueries;
    const size_t last = (panel * width_ + Width(panel) - 1) / kTileQueries;
    const TileState* row = block_.tiles + group * block_.tile_stride;
    const TileState state = row[first];
    for (size_t tile = first + 1; tile <= last; ++tile) {
      if (row[tile] != state) return TileState::kPartial;
    }
    return state;
  }

  // Hull of the key rows that a panel sees.
  Range Keys(size_t panel) const {
    const auto hidden = [&](size_t g) {
      return State(g, panel) == TileState::kHidden;
    };
    if (block_.tiles == nullptr) return {0, keys_};
    Range range{0, groups_};
    while (!range.empty() && hidden(range.begin)) ++range.begin;
    while (!range.empty() && hidden(range.end - 1)) --range.end;
    constexpr size_t kRows = kTileKeys;
    return {range.begin * kRows, std::min(range.end * kRows, keys_)};
  }

  // Whether a panel sees all of the key rows of a hull.
  bool SeesAll(size_t panel, const Range& keys) const {
    if (block_.tiles == nullptr) return true;
    for (size_t g = keys.begin / kTileKeys; g * kTileKeys < keys.end; ++g) {
      if (State(g, panel) != TileState::kVisible) return false;
    }
    return true;
  }

  // Hull of the panels that see any of the key rows [begin, end).
  Range Panels(size_t begin, size_t end) const {
    if (block_.tiles == nullptr) return {0, panels_};
    const size_t first = begin / kTileKeys;
    const size_t last = (end - 1) / kTileKeys;
    const auto hidden = [&](size_t panel) {
      for (size_t g = first; g <= last; ++g) {
        if (State(g, panel) != TileState::kHidden) return false;
      }
      return true;
    };
    Range range{0, panels_};
    while (!range.empty() && hidden(range.begin)) ++range.begin;
    while (!range.empty() && hidden(range.end - 1)) --range.end;
    return range;
  }

 private:
  const Block& block_;
  const size_t width_, keys_, queries_, groups_, panels_;
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
