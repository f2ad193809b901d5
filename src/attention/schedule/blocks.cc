// SPDX-License-Identifier: Apache-2.0
#include "src/attention/schedule/blocks.h"

#include <algorithm>

namespace fa2::attention {

int64_t BlockUnit(int64_t panel, int64_t tile) {
  return panel > tile ? RoundUp(panel, tile) : RoundUp(tile, panel);
}

int64_t FitBlock(int64_t preferred, int64_t rows, int64_t ranges,
                 int64_t unit) {
  const int64_t share =
      RoundUp(CeilDiv(std::max<int64_t>(rows, 1), ranges), unit);
  const int64_t least = RoundUp(std::min(kMinBlock, preferred), unit);
  const int64_t most = RoundUp(preferred, unit);
  const int64_t size = std::max(unit, std::min(most, std::max(share, least)));
  if (rows <= size || rows % size == 0 || 4 * (rows % size) >= size) {
    return size;
  }
  // The last rows would make a block that costs more around its products than
  // they do. If blocks may be a little larger, one less has room for them: 77
  // keys are one block of 80, not one of 64 and one of 13 (backward, 4,096
  // queries: 1.06 times as fast).
  const int64_t larger = RoundUp(CeilDiv(rows, rows / size), unit);
  return larger <= std::min(most, size + size / 2) ? larger : size;
}

void ListBlocks(const Blocks& blocks, size_t sequence,
                std::vector<BlockId>* list) {
  for (int64_t b = 0; b < blocks.count(); ++b) {
    list->push_back({static_cast<int64_t>(sequence), 0, b});
  }
}

}  // namespace fa2::attention
