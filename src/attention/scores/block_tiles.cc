// SPDX-License-Identifier: Apache-2.0
#include "src/attention/scores/block_tiles.h"

#include <algorithm>
#include <cstring>

namespace fa2::attention {
namespace {

constexpr int64_t kWord = 32;  // keys of a word

// Bits [first, first + count) of a row, at most 32.
uint32_t BitsAt(const uint8_t* row, int64_t first, int64_t count) {
  const uint8_t* const bytes = row + first / 8;
  if (first % 8 == 0 && count == kWord) {
    return bytes[0] | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 |
           uint32_t{bytes[3]} << 24;
  }
  const int64_t shift = first % 8;
  uint64_t bits = 0;
  for (int64_t n = 0; 8 * n < shift + count; ++n) {
    bits |= uint64_t{bytes[n]} << 8 * n;
  }
  return static_cast<uint32_t>(bits >> shift & ((uint64_t{1} << count) - 1));
}

// Rows of a pair as rows of its tensors.
Interval Moved(const Interval& rows, int64_t by) {
  return {rows.begin + by, rows.end + by};
}

}  // namespace

BlockTiles::BlockTiles(const Problem& problem, const simd::BlockSizes& largest,
                       threading::ScratchLayout* layout)
    : problem_(problem) {
  if (!given()) return;
  bits_ = layout->Take<uint32_t>(
      static_cast<size_t>(CeilDiv(largest.keys, kWord) * largest.queries));
}

simd::TileState BlockTiles::Find(const PairRows& pair, simd::TileState* tiles,
                                 int64_t tile_stride) {
  using simd::TileState;
  const Sequence& s = problem_.sequences[pair.queries.sequence];
  bool by_bits = false;
  int64_t listed = 0;
  problem_.blocks.ForParts(
      s.batch, pair.queries.head, Moved(pair.queries.rows, s.q_begin),
      Moved(pair.keys.rows, s.k_begin), [&](const BlockLists::Part& part) {
        listed += part.queries.size() * part.keys.size();
        by_bits |= part.bits != nullptr;
      });
  if (listed == 0) return TileState::kHidden;
  if (!by_bits && listed == pair.queries.size() * pair.keys.size()) {
    return TileState::kVisible;
  }
  SetBits(pair);
  SetTiles(pair, tiles, tile_stride);
  return TileState::kPartial;
}

void BlockTiles::SetBits(const PairRows& pair) {
  const Sequence& s = problem_.sequences[pair.queries.sequence];
  const int64_t stride = pair.queries.padded;
  const int64_t q0 = s.q_begin + pair.queries.begin();
  const int64_t k0 = s.k_begin + pair.keys.begin();
  std::fill_n(bits_, CeilDiv(pair.keys.padded, kWord) * stride, 0u);
  problem_.blocks.ForParts(
      s.batch, pair.queries.head, Moved(pair.queries.rows, s.q_begin),
      Moved(pair.keys.rows, s.k_begin), [&](const BlockLists::Part& part) {
        const Interval keys = Moved(part.keys, -k0);
        for (int64_t key = keys.begin; key < keys.end;) {
          const int64_t word = key / kWord;
          const int64_t count = std::min((word + 1) * kWord, keys.end) - key;
          const int64_t shift = key % kWord;
          uint32_t* const to = bits_ + word * stride;
          const Interval queries = Moved(part.queries, -q0);
          if (part.bits == nullptr) {
            const auto all =
                static_cast<uint32_t>(((uint64_t{1} << count) - 1) << shift);
            for (int64_t i = queries.begin; i < queries.end; ++i) to[i] |= all;
          } else {
            const uint8_t* row =
                part.bits +
                (part.queries.begin - part.first_query) * part.stride;
            const int64_t first = key + k0 - part.first_key;
            for (int64_t i = queries.begin; i < queries.end; ++i) {
              to[i] |= BitsAt(row, first, count) << shift;
              row += part.stride;
            }
          }
          key += count;
        }
      });
}

void BlockTiles::SetTiles(const PairRows& pair, simd::TileState* tiles,
                          int64_t tile_stride) const {
  using simd::TileState;
  const int64_t keys = pair.keys.size();
  const int64_t columns = CeilDiv(pair.queries.size(), simd::kTileQueries);
  for (int64_t key = 0; key < keys; key += kWord) {
    const uint32_t* const words = bits_ + key / kWord * pair.queries.padded;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t begin = c * simd::kTileQueries;
      const int64_t end =
          std::min(begin + simd::kTileQueries, pair.queries.size());
      uint32_t some = 0, all = ~uint32_t{0};
      for (int64_t i = begin; i < end; ++i) {
        some |= words[i];
        all &= words[i];
      }
      for (int64_t k = key; k < std::min(key + kWord, keys);
           k += simd::kTileKeys) {
        const int64_t count = std::min(simd::kTileKeys, keys - k);
        const uint32_t wanted = ((uint32_t{1} << count) - 1) << (k - key);
        tiles[k / simd::kTileKeys * tile_stride + c] =
            (some & wanted) == 0       ? TileState::kHidden
            : (all & wanted) == wanted ? TileState::kVisible
                                       : TileState::kPartial;
      }
    }
  }
}

}  // namespace fa2::attention
