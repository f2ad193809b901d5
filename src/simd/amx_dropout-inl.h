// Dropout's bits on AMX, drawn a few at a time between the tile products before
// they are needed, those of dV and dK or of O: Philox takes some 1,100 cycles
// of vector instructions for 32 x 32 elements.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_DROPOUT_INL_H_
#define FA2_SRC_SIMD_AMX_DROPOUT_INL_H_

#include <immintrin.h>

#include "src/simd/engine.h"
#include "src/simd/philox-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Draws the bits of 8 keys x 16 queries of a block.
class DropoutBits {
 public:
  explicit DropoutBits(const ScoreOptions& o)
      : dropout_(o.dropout_stream), keys_(o.dropout_stream.seed) {
    if (!given()) return;
    dropped_ = static_cast<uint32_t>(PhiloxThreshold(dropout_.p) - 1);
    for (int i = 0; i < 16; ++i) {
      lane_[i % 2][i / 2] =
          static_cast<uint64_t>(i) * (dropout_.query_stride / 4);
    }
  }

  bool given() const { return dropout_.p > 0.0; }

  // Bits of key i and the 16 queries go to bits[2 * i].
  HWY_NOINLINE void Draw(int64_t key, int64_t query, uint16_t* bits) const {
    const uint64_t first =
        (dropout_.first + static_cast<uint64_t>(key)) / 4 +
        static_cast<uint64_t>(query) * (dropout_.query_stride / 4);
    // Four chains of products: one alone takes 70 cycles, in which the unit
    // could do four.
    __m512i c[4][4];
    for (int g = 0; g < 4; ++g) {
      c[g][0] = _mm512_add_epi64(
          _mm512_load_si512(lane_[g % 2]),
          _mm512_set1_epi64(static_cast<long long>(first + g / 2)));
    }
    Philox(c);
    for (int g = 0; g < 4; g += 2) {
      for (int w = 0; w < 4; ++w) {
        const __m512i words = _mm512_mask_shuffle_epi32(
            c[g][w], 0xAAAA, c[g + 1][w], _MM_PERM_CDAB);
        bits[4 * g + 2 * w] = static_cast<uint16_t>(_mm512_cmpgt_epu32_mask(
            words, _mm512_set1_epi32(static_cast<int>(dropped_))));
      }
    }
  }

 private:
  // PhiloxBlocks of philox-inl.h for the four groups of blocks c[.][0].
  HWY_INLINE void Philox(__m512i (&c)[4][4]) const {
    const __m512i multiplier0 = _mm512_set1_epi64(kPhiloxMultiplier0);
    const __m512i multiplier1 = _mm512_set1_epi64(kPhiloxMultiplier1);
    const auto key = [this](int i) HWY_ATTR {
      return _mm512_set1_epi64(static_cast<long long>(keys_.word[i]));
    };
    for (int g = 0; g < 4; ++g) {
      const __m512i block = c[g][0];
      const __m512i product = _mm512_mul_epu32(block, multiplier0);
      c[g][0] = _mm512_xor_si512(_mm512_srli_epi64(block, 32), key(0));
      c[g][1] = _mm512_setzero_si512();
      c[g][2] = _mm512_xor_si512(_mm512_srli_epi64(product, 32), key(1));
      c[g][3] = product;
    }
    for (int round = 1; round < 10; ++round) {
      const __m512i key0 = key(2 * round), key1 = key(2 * round + 1);
      for (int g = 0; g < 4; ++g) {
        const __m512i product0 = _mm512_mul_epu32(c[g][0], multiplier0);
        const __m512i product1 = _mm512_mul_epu32(c[g][2], multiplier1);
        const __m512i high0 = _mm512_shuffle_epi32(product0, _MM_PERM_CDAB);
        const __m512i high1 = _mm512_srli_epi64(product1, 32);
        c[g][0] = _mm512_ternarylogic_epi64(high1, c[g][1], key0, 0x96);
        c[g][1] = product1;
        c[g][2] = _mm512_ternarylogic_epi64(high0, c[g][3], key1, 0x96);
        c[g][3] = product0;
      }
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
    units_ = given() ? 2 * query_panels_ * (kKeys / 8) : 0;
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
    const int64_t half = unit_ / (kKeys / 8);  // of a query panel
    const int64_t key = unit_ % (kKeys / 8) * 8;
    ++unit_;
    source_.Draw(key_ + key, 16 * half,
                 bits_ + half / 2 * 2 * kKeys + 2 * key + half % 2);
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
