// SPDX-License-Identifier: Apache-2.0

// What the backward pass on AMX keeps of a block between its products: P and dS
// as operands, and the memory they and the fused pass work in.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_BACKWARD_SCRATCH_INL_H_
#define FA2_SRC_SIMD_AMX_BACKWARD_SCRATCH_INL_H_

#include <algorithm>

#include "src/simd/amx/backward/fused_pass-inl.h"
#include "src/simd/amx/dropout-inl.h"
#include "src/simd/amx/stream-inl.h"
#include "src/simd/amx/visibility.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

inline constexpr int64_t kSlabPanels = SlabDropout::kKeys / 32;

// Scratch of a backward block, carved from one allocation. The tiles of S and
// dP lie in the page so that their stores are a quarter page or more from the
// tile loads around them.
struct BackwardScratch {
  uint8_t* tiles;  // 4 pages
  uint8_t* p;
  uint8_t* ds;
  uint8_t* pairs;
  float* lse2;
  float* minus_delta;     // what the tiles of dP start from
  float* position;        // of a sub-block's queries, less its first key
  uint16_t* all_visible;  // bits of a sub-block: all
  uint16_t* visible;      // some
  float* bias;            // of a sub-block of bias_stream
  uint8_t* s_start;       // tiles of a sub-block, see BiasOfProducts
  float* score_gradient;  // of ds_stream
  void* keep;             // of SlabDropout
  SubBlockMap sub_blocks;
  int64_t slab_bytes;   // a term of P or dS
  int64_t chunk_bytes;  // a term of dS pairs
  int64_t bytes;

  // Of a block of `keys` panels; the whole of it, where that is less than a
  // chunk.
  static int64_t ChunkPanels(int64_t keys, int64_t head_dim) {
    return std::min(amx::ChunkPanels(head_dim), keys);
  }

  // Of `keys` x `queries` in chunks of `chunk` keys, all in panels. P and dS
  // lie in panels of `panel_tiles` query tiles, see ScoreLayout.
  BackwardScratch(void* memory, int64_t keys, int64_t queries, int64_t chunk,
                  int64_t panel_tiles, int64_t p_terms, int64_t ds_terms) {
    const auto round_up = [](int64_t n, int64_t to) {
      return (n + to - 1) / to * to;
    };
    const int64_t columns = round_up(queries, panel_tiles);
    // Slabs of few queries have more keys, but fill no more than one of 8 query
    // tiles.
    slab_bytes = std::min(keys * columns, kSlabPanels * round_up(queries, 8)) *
                 2 * kTileBytes;
    chunk_bytes = chunk * columns * 2 * kTileBytes;
    int64_t used = 0;
    uint8_t* const base = static_cast<uint8_t*>(memory);
    const auto take = [&](int64_t n) {
      uint8_t* p = base + used;
      used += round_up(n, 64);
      return p;
    };
    // Whole pages first.
    tiles = take(4 * 4096);
    p = take(slab_bytes * p_terms);
    ds = take(slab_bytes * ds_terms);
    pairs = take(chunk_bytes * ds_terms);
    bias = reinterpret_cast<float*>(take(kStreamElements * 4));
    s_start = take(4 * kTileBytes);
    score_gradient = reinterpret_cast<float*>(take(kStreamElements * 4));
    lse2 = reinterpret_cast<float*>(take(queries * 128));
    minus_delta = reinterpret_cast<float*>(take(queries * 128));
    position = reinterpret_cast<float*>(take(128));
    all_visible = reinterpret_cast<uint16_t*>(take(128));
    visible = reinterpret_cast<uint16_t*>(take(128));
    keep = take(SlabDropout::Bytes(queries));
    sub_blocks = {reinterpret_cast<SubBlock*>(
                      take(keys * queries * int64_t{sizeof(SubBlock)})),
                  queries};
    bytes = used;
  }
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_BACKWARD_SCRATCH_INL_H_
