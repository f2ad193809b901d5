#include "src/attention/bias_tiles.h"

#include <algorithm>
#include <cstring>

namespace fa2::attention {
namespace {

// Whether an element masks: false, or -inf of a float dtype (told by its bits).
bool Masks(const char* element, DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return *element == 0;
    case DType::kF32: {
      uint32_t bits;
      memcpy(&bits, element, sizeof(bits));
      return bits == 0xFF800000u;
    }
    case DType::kF64: {
      uint64_t bits;
      memcpy(&bits, element, sizeof(bits));
      return bits == 0xFFF0000000000000u;
    }
    default: {
      uint16_t bits;
      memcpy(&bits, element, sizeof(bits));
      return bits == (dtype == DType::kBF16 ? 0xFF80 : 0xFC00);
    }
  }
}

// What some elements hold.
struct Seen {
  bool any = false;  // one that is visible
  bool all = true;
};

// kTileKeys bytes of a boolean mask, eight at a time.
Seen ScanBytes(const char* bytes) {
  uint64_t ones = 0;   // of all bytes
  uint64_t zeros = 0;  // the top bit of bytes that are 0
  for (int64_t k = 0; k < simd::kTileKeys; k += 8) {
    constexpr uint64_t kLow = 0x7F7F7F7F7F7F7F7Fu;
    uint64_t word;
    memcpy(&word, bytes + k, sizeof(word));
    ones |= word;
    zeros |= ~(((word & kLow) + kLow) | word | kLow);
  }
  return {ones != 0, zeros == 0};
}

}  // namespace

bool AnyVisible(const simd::ScoreMatrix& bias, const simd::StagedShape& shape) {
  const int64_t size = static_cast<int64_t>(SizeOf(bias.dtype));
  for (int64_t q = 0; q < shape.queries; ++q) {
    const char* element =
        static_cast<const char*>(bias.data) + q * bias.query_stride * size;
    for (int64_t k = 0; k < shape.keys; ++k) {
      if (!Masks(element, bias.dtype)) return true;
      element += bias.key_stride * size;
    }
  }
  return false;
}

BiasTiles::BiasTiles(const Problem& problem, Carver* carver)
    : problem_(problem) {
  const ConstTensorView& bias = problem.options.bias;
  if (!bias.given()) return;
  const int64_t rows = bias.sizes[0] * bias.sizes[1] * bias.sizes[2];
  const int64_t all_rows =
      problem.q.sizes[0] * problem.q_heads * problem.q.sizes[2];
  wanted_ = bias.dtype == DType::kBool || rows < all_rows;
  if (!wanted_) return;
  plane_heads_ = bias.sizes[1];
  planes_ = bias.sizes[0] * bias.sizes[1];
  query_tiles_ = CeilDiv(bias.sizes[2], simd::kTileQueries);
  key_tiles_ = CeilDiv(problem.k.sizes[2], simd::kTileKeys);
  states_ = carver->Take<simd::TileState>(
      static_cast<size_t>(planes_ * query_tiles_ * key_tiles_));
}

simd::TileState BiasTiles::ScanTile(int64_t plane, int64_t query_tile,
                                    int64_t key_tile) const {
  const ConstTensorView& bias = problem_.options.bias;
  const bool broadcast_keys = bias.sizes[3] == 1;
  const int64_t q0 = query_tile * simd::kTileQueries;
  const int64_t q1 = std::min(q0 + simd::kTileQueries, bias.sizes[2]);
  const int64_t k0 = broadcast_keys ? 0 : key_tile * simd::kTileKeys;
  const int64_t k1 = std::min(k0 + simd::kTileKeys, bias.sizes[3]);
  const int64_t step =
      bias.strides[3] * static_cast<int64_t>(SizeOf(bias.dtype));
  const bool boolean = bias.dtype == DType::kBool;
  const bool bytes = boolean && step == 1 && k1 - k0 == simd::kTileKeys;
  Seen tile;
  for (int64_t q = q0; q < q1; ++q) {
    const char* element =
        At(bias, plane / plane_heads_, plane % plane_heads_, q, k0);
    Seen row;
    if (bytes) {
      row = ScanBytes(element);
    } else {
      for (int64_t k = k0; k < k1; ++k, element += step) {
        const bool masks = Masks(element, bias.dtype);
        row.any |= !masks;
        row.all &= !masks;
      }
    }
    tile.any |= row.any;
    tile.all &= row.all;
    // A float bias is to be added wherever anything is visible.
    if (tile.any && (!tile.all || !boolean)) break;
  }
  if (!tile.any) return simd::TileState::kHidden;
  return tile.all && boolean ? simd::TileState::kVisible
                             : simd::TileState::kPartial;
}

void BiasTiles::Scan(threading::Team& team) {
  if (!known()) return;
  team.For(planes_ * query_tiles_, [&](int64_t item, int) {
    simd::TileState* row = states_ + item * key_tiles_;
    for (int64_t k = 0; k < key_tiles_; ++k) {
      row[k] = ScanTile(item / query_tiles_, item % query_tiles_, k);
    }
  });
}

simd::TileState BiasTiles::State(int64_t sequence, int64_t head, int64_t q,
                                 int64_t k) const {
  const ConstTensorView& bias = problem_.options.bias;
  const int64_t b = bias.sizes[0] == 1 ? 0 : sequence;
  const int64_t h = bias.sizes[1] == 1 ? 0 : head;
  const int64_t query_tile = bias.sizes[2] == 1 ? 0 : q / simd::kTileQueries;
  const int64_t key_tile = k / simd::kTileKeys;
  // Tiles of padding alone.
  if (query_tile >= query_tiles_ || key_tile >= key_tiles_) {
    return simd::TileState::kHidden;
  }
  return states_[((b * plane_heads_ + h) * query_tiles_ + query_tile) *
                     key_tiles_ +
                 key_tile];
}

bool BiasTiles::AllVisible(int64_t sequence, int64_t head, Interval queries,
                           Interval keys) const {
  if (!known()) return false;
  for (int64_t q = queries.begin; q < queries.end; q += simd::kTileQueries) {
    for (int64_t k = keys.begin; k < keys.end; k += simd::kTileKeys) {
      if (State(sequence, head, q, k) != simd::TileState::kVisible) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace fa2::attention
