// SPDX-License-Identifier: Apache-2.0

// What AMX's LDTILECFG loads and STTILECFG stores (Intel's manual, volume 1,
// "Tile configuration"). As it stands here: tiles released.
#ifndef FA2_SRC_PLATFORM_TILE_CONFIG_H_
#define FA2_SRC_PLATFORM_TILE_CONFIG_H_

#include <cstdint>

namespace fa2::platform {

struct alignas(64) TileConfig {
  uint8_t palette = 0;  // 1: eight tiles of up to 16 rows of 64 bytes
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

}  // namespace fa2::platform

#endif  // FA2_SRC_PLATFORM_TILE_CONFIG_H_
