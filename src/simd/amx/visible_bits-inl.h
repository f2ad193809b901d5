// SPDX-License-Identifier: Apache-2.0

// Which elements of a sub-block of 32 keys x 32 queries are visible, as bits:
// by the range of keys that each query sees, by a mask and by a block mask.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_VISIBLE_BITS_INL_H_
#define FA2_SRC_SIMD_AMX_VISIBLE_BITS_INL_H_

#include <cstdint>

#include "src/simd/amx/stream-inl.h"
#include "src/simd/amx/visibility.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/mask_scan.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// For each of 32 keys those of queries 0-15, then of 16-31.
inline constexpr int kVisibleWords = 2 * 32;

// For each of 16 queries the keys from `begin`, in rows of the block, on; bit 0
// is key `first`.
HWY_INLINE Words KeysFrom(const float* begin, int64_t first) {
  const hn::FixedTag<int32_t, 16> d;
  const WordTag words;
  const auto at = hn::Sub(hn::ConvertTo(d, hn::LoadU(FloatTag(), begin)),
                          hn::Set(d, static_cast<int32_t>(first)));
  // vpsllvd: a shift by 32 and more leaves nothing.
  return hn::Shl(hn::Set(words, ~uint32_t{0}),
                 hn::BitCast(words, hn::Max(at, hn::Zero(d))));
}

// Those of up to 32 keys side by side that a mask shows. `there`: bits of keys
// that there are.
HWY_INLINE uint32_t ShownKeys(const uint8_t* row, DType dtype, uint32_t there) {
  const uint64_t hides = HidingBits(dtype);
  switch (SizeOf(dtype)) {
    case 1: {
      const hn::FixedTag<uint8_t, 32> d;
      const auto elements =
          hn::MaskedLoad(hn::Mask<decltype(d)>{there}, d, row);
      return static_cast<uint32_t>(hn::Ne(elements, hn::Zero(d)).raw);
    }
    case 2: {
      const Bf16Tag d;
      const Bf16s elements = hn::MaskedLoad(
          Bf16MaskOf(there), d, reinterpret_cast<const uint16_t*>(row));
      return there &
             BitsOf(hn::Ne(elements, hn::Set(d, static_cast<uint16_t>(hides))));
    }
    default: {
      const WordTag d;
      uint32_t shown = 0;
      for (int half = 0; half < 2; ++half) {
        const auto part = static_cast<uint16_t>(there >> 16 * half);
        const Words elements =
            hn::MaskedLoad(hn::Mask<WordTag>{part}, d,
                           reinterpret_cast<const uint32_t*>(row) + 16 * half);
        const uint16_t differs =
            BitsOf(hn::Ne(elements, hn::Set(d, static_cast<uint32_t>(hides))));
        shown |= static_cast<uint32_t>(part & differs) << 16 * half;
      }
      return shown;
    }
  }
}

// For each of 32 queries the keys that a mask shows.
inline void MaskedKeys(const StreamPart& part, uint32_t* keys) {
  const ScoreMatrix& m = part.matrix;
  const int64_t size = static_cast<int64_t>(SizeOf(m.dtype));
  const uint8_t* row = static_cast<const uint8_t*>(m.data);
  const auto there =
      static_cast<uint32_t>((uint64_t{1} << part.shape.keys) - 1);
  for (int64_t q = 0; q < 32; ++q) {
    keys[q] = 0;
    if (q >= part.shape.queries) continue;
    if (m.key_stride == 1 && size <= 4) {
      keys[q] = ShownKeys(row, m.dtype, there);
    } else {
      for (int64_t k = 0; k < part.shape.keys; ++k) {
        if (!Hides(row + k * m.key_stride * size, m.dtype)) {
          keys[q] |= uint32_t{1} << k;
        }
      }
    }
    row += m.query_stride * size;
  }
}

// The bits of sub-block `sub`, at (key, query), both in panels.
inline HWY_NOINLINE void VisibleBits(const SubBlock& sub, const ScoreOptions& o,
                                     int64_t key, int64_t query,
                                     uint16_t* bits) {
  const WordTag words;
  uint32_t all = 0, some = 0;  // keys, by the state of their tile
  for (int half = 0; half < 2; ++half) {
    const uint32_t keys = 0xFFFFu << 16 * half;
    if (sub.half[half] == TileState::kVisible) all |= keys;
    if (sub.half[half] == TileState::kPartial) some |= keys;
  }
  alignas(64) uint32_t masked[32];
  const bool by_mask = some != 0 && o.mask_stream.given();
  if (by_mask) MaskedKeys(StreamPart(o.mask_stream, key, query), masked);
  for (int half = 0; half < 2; ++half) {
    Words keys = hn::Zero(words);
    if (some != 0) {
      const int64_t column = 32 * query + 16 * half;
      const auto* const begin = static_cast<const float*>(o.visible_begin);
      const auto* const end = static_cast<const float*>(o.visible_end);
      keys = hn::AndNot(KeysFrom(end + column, 32 * key),
                        KeysFrom(begin + column, 32 * key));
    }
    if (by_mask) keys = hn::And(keys, hn::Load(words, masked + 16 * half));
    if (some != 0 && o.visible_bits != nullptr) {
      keys = hn::And(
          keys, hn::LoadU(words, o.visible_bits + key * o.visible_bits_stride +
                                     32 * query + 16 * half));
    }
    keys = hn::Or(hn::And(keys, hn::Set(words, some)), hn::Set(words, all));
    Words bit = hn::Set(words, 1u);
    for (int k = 0; k < 32; ++k) {
      bits[2 * k + half] = BitsOf(hn::TestBit(keys, bit));
      bit = hn::Add(bit, bit);
    }
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_VISIBLE_BITS_INL_H_
