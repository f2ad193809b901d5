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
  return std::max(unit,
                  std::min(RoundUp(preferred, unit), std::max(share, least)));
}

void ListBlocks(const Blocks& blocks, size_t sequence,
                std::vector<BlockId>* list) {
  for (int64_t b = 0; b < blocks.count(); ++b) {
    list->push_back({static_cast<int64_t>(sequence), 0, b});
  }
}

}  // namespace fa2::attention
