// SPDX-License-Identifier: Apache-2.0

// Dropout's bits on AMX, drawn a few at a time between the tile products before
// they are needed, those of dV and dK or of O: Philox takes some 1,200 cycles
// of vector instructions for 32 x 32 elements.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_DROPOUT_INL_H_
#define FA2_SRC_SIMD_AMX_DROPOUT_INL_H_

#include "src/simd/amx/vector-inl.h"
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
    HWY_UNROLL(8)
    for (int g = 0; g < kChains; ++g) {
      const uint64_t quad = static_cast<uint64_t>(g / 2 % 2);
      const uint64_t half = static_cast<uint64_t>(g / 4);
      c.product0[g] =
          hn::Add(hn::Load(BlockTag(), lane_[g % 2]),
                  hn::Set(BlockTag(), first + quad + 16 * half * stride));
    }
    Rounds(c);
    const Words dropped = hn::Set(WordTag(), dropped_);
    HWY_UNROLL(4)
    for (int g = 0; g < kChains; g += 2) {
      const Words words[4] = {
          hn::Xor3(Highs(&c.product1[g]), Lows(&c.c1[g]), Key(18)),
          Lows(&c.product1[g]),
          hn::Xor3(Highs(&c.product0[g]), Lows(&c.c3[g]), Key(19)),
          Lows(&c.product0[g])};
      const int first_bits = 4 * (g % 4) + g / 4;
      for (int w = 0; w < 4; ++w) {
        bits[first_bits + 2 * w] = BitsOf(hn::Gt(words[w], dropped));
      }
    }
  }

 private:
  using BlockTag = hn::FixedTag<uint64_t, 8>;
  using Blocks = hn::Vec<BlockTag>;

  // Philox blocks of 16 queries, even ones and odd ones, for four keys and the
  // next four; then of the other 16. A chain alone takes 70 cycles, in which
  // the unit could do four; as calls have a beginning and an end, eight: 280
  // cycles, with four tile products among them too. Calls of four took 315 to
  // 350.
  static constexpr int kChains = 8;
  struct Chains {
    Blocks c1[kChains], c3[kChains], product0[kChains], product1[kChains];
  };

  static HWY_INLINE Words AsWords(Blocks x) {
    return hn::BitCast(WordTag(), x);
  }
  HWY_INLINE Blocks Key64(int i) const {
    return hn::Set(BlockTag(), keys_.word[i]);
  }
  HWY_INLINE Words Key(int i) const { return AsWords(Key64(i)); }
  // The product of the lower halves.
  static HWY_INLINE Blocks Product(Blocks x, Words multiplier) {
    return hn::MulEven(AsWords(x), multiplier);
  }
  static HWY_INLINE Blocks High(Blocks product) {
    return hn::ShiftRight<32>(product);
  }
  static HWY_INLINE Blocks Swapped(Blocks product) {
    return hn::BitCast(BlockTag(), hn::Shuffle2301(AsWords(product)));
  }
  // Of even and odd queries, those of the odd ones in upper halves.
  static HWY_INLINE Words Lows(const Blocks* c) {
    return hn::OddEven(AsWords(Swapped(c[1])), AsWords(c[0]));
  }
  static HWY_INLINE Words Highs(const Blocks* c) {
    return hn::OddEven(AsWords(c[1]), AsWords(Swapped(c[0])));
  }

  // PhiloxRounds of philox-inl.h for the blocks c.product0.
  HWY_INLINE void Rounds(Chains& c) const {
    const Words multiplier0 = hn::Set(WordTag(), kPhiloxMultiplier0);
    const Words multiplier1 = hn::Set(WordTag(), kPhiloxMultiplier1);
    Blocks c0[kChains], c2[kChains];
    HWY_UNROLL(8)
    for (int g = 0; g < kChains; ++g) {
      const Blocks product0 = Product(c.product0[g], multiplier0);
      c2[g] = hn::Xor(High(product0), Key64(1));
      c.c1[g] = Product(c2[g], multiplier1);
      c0[g] = hn::Xor(Swapped(c.c1[g]), Key64(2));
      c2[g] = hn::Xor(product0, Key64(3));
    }
    HWY_UNROLL(8)
    for (int g = 0; g < kChains; ++g) {
      c.c3[g] = Product(c0[g], multiplier0);
      const Blocks product1 = Product(c2[g], multiplier1);
      c0[g] = hn::Xor3(High(product1), c.c1[g], Key64(4));
      c2[g] = hn::Xor(Swapped(c.c3[g]), Key64(5));
      c.c1[g] = product1;
    }
    HWY_UNROLL(6)
    for (int round = 3; round < 9; ++round) {
      const Blocks key0 = Key64(2 * round), key1 = Key64(2 * round + 1);
      HWY_UNROLL(8)
      for (int g = 0; g < kChains; ++g) {
        const Blocks product0 = Product(c0[g], multiplier0);
        const Blocks product1 = Product(c2[g], multiplier1);
        c0[g] = hn::Xor3(High(product1), c.c1[g], key0);
        c2[g] = hn::Xor3(Swapped(product0), c.c3[g], key1);
        c.c1[g] = product1;
        c.c3[g] = product0;
      }
    }
    HWY_UNROLL(8)
    for (int g = 0; g < kChains; ++g) {
      c.product0[g] = Product(c0[g], multiplier0);
      c.product1[g] = Product(c2[g], multiplier1);
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
