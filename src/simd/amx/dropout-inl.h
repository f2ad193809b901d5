// SPDX-License-Identifier: Apache-2.0

// Dropout's bits on AMX, drawn a few at a time between the tile products before
// they are needed, those of dV and dK or of O: Philox takes some 1,200 cycles
// of vector instructions for 32 x 32 elements.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_DROPOUT_INL_H_
#define FA2_SRC_SIMD_AMX_DROPOUT_INL_H_

#include <immintrin.h>

#include "src/simd/engine.h"
#include "src/simd/math/philox-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Draws the bits of 8 keys x 32 queries of a block.
class DropoutBits {
 public:
  explicit DropoutBits(const ScoreOptions& o)
      : dropout_(o.dropout_stream),
        keys_(o.dropout_stream.seed, o.dropout_stream.UpperWord()) {
    if (!given()) return;
    dropped_ = static_cast<uint32_t>(PhiloxThreshold(dropout_.p) - 1);
    for (int i = 0; i < 16; ++i) {
      lane_[i % 2][i / 2] =
          static_cast<uint64_t>(i) * (dropout_.query_stride / 4);
    }
  }

  bool given() const { return dropout_.p > 0.0; }

  // Bits of key i go to bits[2 * i] and, of queries 16 to 31, to
  // bits[2 * i + 1].
  HWY_NOINLINE void Draw(int64_t key, int64_t query, uint16_t* bits) const {
    const uint64_t stride = dropout_.query_stride / 4;
    const uint64_t first = (dropout_.first + static_cast<uint64_t>(key)) / 4 +
                           static_cast<uint64_t>(query) * stride;
    Chains c;
    for (int g = 0; g < kChains; ++g) {
      const uint64_t quad = static_cast<uint64_t>(g / 2 % 2);
      const uint64_t half = static_cast<uint64_t>(g / 4);
      c.product0[g] = _mm512_add_epi64(_mm512_load_si512(lane_[g % 2]),
                                       _mm512_set1_epi64(static_cast<long long>(
                                           first + quad + 16 * half * stride)));
    }
    Rounds(c);
    const __m512i dropped = _mm512_set1_epi32(static_cast<int>(dropped_));
    for (int g = 0; g < kChains; g += 2) {
      const __m512i words[4] = {
          _mm512_ternarylogic_epi32(Highs(&c.product1[g]), Lows(&c.c1[g]),
                                    Key(18), 0x96),
          Lows(&c.product1[g]),
          _mm512_ternarylogic_epi32(Highs(&c.product0[g]), Lows(&c.c3[g]),
                                    Key(19), 0x96),
          Lows(&c.product0[g])};
      const int first_bits = 4 * (g % 4) + g / 4;
      for (int w = 0; w < 4; ++w) {
        bits[first_bits + 2 * w] =
            static_cast<uint16_t>(_mm512_cmpgt_epu32_mask(words[w], dropped));
      }
    }
  }

 private:
  // Philox blocks of 16 queries, even ones and odd ones, for four keys and the
  // next four; then of the other 16. A chain alone takes 70 cycles, in which
  // the unit could do four; as calls have a beginning and an end, eight: 280
  // cycles, with four tile products among them too. Calls of four took 315 to
  // 350.
  static constexpr int kChains = 8;
  struct Chains {
    __m512i c1[kChains], c3[kChains], product0[kChains], product1[kChains];
  };

  HWY_INLINE __m512i Key(int i) const {
    return _mm512_set1_epi64(static_cast<long long>(keys_.word[i]));
  }
  static HWY_INLINE __m512i High(__m512i product) {
    return _mm512_srli_epi64(product, 32);
  }
  static HWY_INLINE __m512i Swapped(__m512i product) {
    return _mm512_shuffle_epi32(product, _MM_PERM_CDAB);
  }
  // Of even and odd queries, those of the odd ones in upper halves.
  static HWY_INLINE __m512i Lows(const __m512i* c) {
    return _mm512_mask_shuffle_epi32(c[0], 0xAAAA, c[1], _MM_PERM_CDAB);
  }
  static HWY_INLINE __m512i Highs(const __m512i* c) {
    return _mm512_mask_shuffle_epi32(c[1], 0x5555, c[0], _MM_PERM_CDAB);
  }

  // PhiloxRounds of philox-inl.h for the blocks c.product0.
  HWY_INLINE void Rounds(Chains& c) const {
    const __m512i multiplier0 = _mm512_set1_epi64(kPhiloxMultiplier0);
    const __m512i multiplier1 = _mm512_set1_epi64(kPhiloxMultiplier1);
    __m512i c0[kChains], c2[kChains];
    for (int g = 0; g < kChains; ++g) {
      const __m512i product0 = _mm512_mul_epu32(c.product0[g], multiplier0);
      c2[g] = _mm512_xor_si512(High(product0), Key(1));
      c.c1[g] = _mm512_mul_epu32(c2[g], multiplier1);
      c0[g] = _mm512_xor_si512(Swapped(c.c1[g]), Key(2));
      c2[g] = _mm512_xor_si512(product0, Key(3));
    }
    for (int g = 0; g < kChains; ++g) {
      c.c3[g] = _mm512_mul_epu32(c0[g], multiplier0);
      const __m512i product1 = _mm512_mul_epu32(c2[g], multiplier1);
      c0[g] = _mm512_ternarylogic_epi64(High(product1), c.c1[g], Key(4), 0x96);
      c2[g] = _mm512_xor_si512(Swapped(c.c3[g]), Key(5));
      c.c1[g] = product1;
    }
    for (int round = 3; round < 9; ++round) {
      const __m512i key0 = Key(2 * round), key1 = Key(2 * round + 1);
      for (int g = 0; g < kChains; ++g) {
        const __m512i product0 = _mm512_mul_epu32(c0[g], multiplier0);
        const __m512i product1 = _mm512_mul_epu32(c2[g], multiplier1);
        c0[g] = _mm512_ternarylogic_epi64(High(product1), c.c1[g], key0, 0x96);
        c2[g] =
            _mm512_ternarylogic_epi64(Swapped(product0), c.c3[g], key1, 0x96);
        c.c1[g] = product1;
        c.c3[g] = product0;
      }
    }
    for (int g = 0; g < kChains; ++g) {
      c.product0[g] = _mm512_mul_epu32(c0[g], multiplier0);
      c.product1[g] = _mm512_mul_epu32(c2[g], multiplier1);
    }
  }

  const DropoutBlock& dropout_;
  const PhiloxKeys keys_;
  HWY_ALIGN uint64_t lane_[2][8];  // blocks from the first query to the lanes'
  uint32_t dropped_ = 0;           // the greatest output that is dropped
};

// Bits of 64 keys and all queries of a block.
class SlabDropout {
 public:
  static constexpr int64_t kKeys = 64;
  static constexpr int64_t Bytes(int64_t query_panels) {
    return query_panels * kKeys * 4;
  }

  // Does nothing if the block has no dropout_stream.
  SlabDropout(const ScoreOptions& o, int64_t query_panels, void* bits)
      : source_(o),
        query_panels_(query_panels),
        bits_(static_cast<uint16_t*>(bits)) {}

  bool given() const { return source_.given(); }
  // Of the first key of the slab, [32 keys ahead by 64][2 halves] a panel.
  const uint16_t* Panel(int64_t query_panel) const {
    return bits_ + query_panel * 2 * kKeys;
  }

  // Starts on the keys [key, key + kKeys) of the block.
  void Begin(int64_t key) {
    key_ = key;
    unit_ = 0;
    units_ = given() ? query_panels_ * (kKeys / 8) : 0;
  }
  // Draws what is left of them.
  void Finish() {
    while (unit_ < units_) Unit();
  }
  // After four tile products.
  HWY_INLINE void Step() {
    if (unit_ < units_) Unit();
  }

 private:
  HWY_INLINE void Unit() {
    const int64_t panel = unit_ / (kKeys / 8);
    const int64_t key = unit_ % (kKeys / 8) * 8;
    ++unit_;
    source_.Draw(key_ + key, 32 * panel, bits_ + panel * 2 * kKeys + 2 * key);
  }

  const DropoutBits source_;
  const int64_t query_panels_;
  uint16_t* const bits_;
  int64_t key_ = 0;
  int64_t unit_ = 0;
  int64_t units_ = 0;
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_DROPOUT_INL_H_
