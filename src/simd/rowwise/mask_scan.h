// SPDX-License-Identifier: Apache-2.0

// Masks given as arrays: which elements hide, and what that makes of tiles.
#ifndef FA2_SRC_SIMD_ROWWISE_MASK_SCAN_H_
#define FA2_SRC_SIMD_ROWWISE_MASK_SCAN_H_

#include <cstdint>
#include <cstring>

#include "fa2/types.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/staging.h"

namespace fa2::simd {

// The bits of an element that hides its key: false, or -inf.
constexpr uint64_t HidingBits(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0xFFF0000000000000u;
    case DType::kF32:
      return 0xFF800000u;
    case DType::kBF16:
      return 0xFF80u;
    case DType::kF16:
      return 0xFC00u;
    default:
      return 0;
  }
}

// Whether an element of such a dtype does.
inline bool Hides(const void* element, DType dtype) {
  const auto is = [=](auto hiding) {
    return std::memcmp(element, &hiding, sizeof hiding) == 0;
  };
  const uint64_t bits = HidingBits(dtype);
  switch (SizeOf(dtype)) {
    case 1:
      return is(static_cast<uint8_t>(bits));
    case 2:
      return is(static_cast<uint16_t>(bits));
    case 4:
      return is(static_cast<uint32_t>(bits));
    default:
      return is(bits);
  }
}

// States of the tiles of `queries` rows, at most kTileQueries, and `keys`
// columns of a mask, one for each kTileKeys columns. False as soon as the
// matrix turns out to be none, since it holds something else than HidingBits
// and, of a float dtype, 0.
using MaskScan = bool (*)(const ScoreMatrix& mask, int64_t queries,
                          int64_t keys, TileState* states);

MaskScan MaskScanFor(int64_t targets);

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_ROWWISE_MASK_SCAN_H_
