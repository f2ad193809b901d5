// SPDX-License-Identifier: Apache-2.0

// How the AMX engines lay out packed operands and accumulators: always whole
// tiles of 1 KiB, in the order in which the products read them.
//
// A value is held as a sum of `terms` bf16 numbers (1: bf16 itself; 2: exact
// for f16, 16 bits of an f32; 3: 24 bits, all of an f32).
//
//   kScoreLeft   [32 rows][term][half][depth / 32] tiles of 16 rows x 32 depth
//   kScoreRight  [32 rows][term][half][depth / 32] tiles of 16 depth pairs x
//                16 rows
//   kGradRight   [term][depth / 16][32 rows] tiles of 16 row pairs x 16 depth
//   kGradLeft    [chunk][term][depth / 16][32 rows] tiles of 16 depth x 32 rows
//   key accumulator    [16 keys][depth / 16] tiles of 16 keys x 16 depth
//   query accumulator  [32 queries][depth / 16][2] tiles of 16 depth x 16
//                      queries, whose columns are in the order of QueryOfLane
#ifndef FA2_SRC_SIMD_AMX_LAYOUT_H_
#define FA2_SRC_SIMD_AMX_LAYOUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "src/simd/engine.h"

namespace fa2::simd::amx {

inline constexpr int64_t kPanel = 32;  // keys and queries of a sub-block
inline constexpr int64_t kTile = 1024;

// The head dim in steps of 32, one tile product deep.
constexpr int64_t DepthTiles(int64_t depth) { return (depth + 31) / 32; }
constexpr int64_t Panels(int64_t rows) { return (rows + 31) / 32; }

constexpr int64_t PackedBytes(int64_t rows, int64_t depth, int64_t terms) {
  return Panels(rows) * DepthTiles(depth) * 2 * kTile * terms;
}
constexpr int64_t AccumulatorBytes(int64_t rows, int64_t depth) {
  return Panels(rows) * DepthTiles(depth) * 4 * kTile;
}

// Keys of a chunk, in panels: dS of a chunk of keys is kept for dQ^T = K^T dS^T
// and must stay in L2 beside the block's operands; a longer chunk passes the
// accumulator of dQ through the tile registers less often (half as long: D 64
// -3.5%, D 128 -1.6%).
constexpr int64_t ChunkPanels(int64_t depth) {
  return depth <= 64 || depth > 128 ? 8 : 16;
}

// Unpacking 16-bit pairs works in 128-bit lanes, so lane c of half h of a
// panel's queries is this one.
constexpr int64_t QueryOfLane(int64_t half, int64_t lane) {
  return lane / 4 * 8 + half * 4 + lane % 4;
}

}  // namespace fa2::simd::amx

#endif  // FA2_SRC_SIMD_AMX_LAYOUT_H_
