// SPDX-License-Identifier: Apache-2.0

// Philox4x32-10 (Salmon et al. 2011) on vectors, one block a lane: of one
// stream, or of rows that lie apart.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_MATH_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_MATH_PHILOX_INL_H_
#undef FA2_SRC_SIMD_MATH_PHILOX_INL_H_
#else
#define FA2_SRC_SIMD_MATH_PHILOX_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "src/common/philox.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Keeping is monotonic in the 32-bit output: the least output that is kept, or
// 2^32 when none is. An integer comparison with it decides just as
// PhiloxUniform(x) > p does.
inline uint64_t PhiloxThreshold(double p) {
  uint64_t low = 0;
  uint64_t high = uint64_t{1} << 32;
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    if (PhiloxUniform(static_cast<uint32_t>(middle)) > static_cast<float>(p)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The high words of 32 x 32 bit products.
template <class D, class V>
HWY_INLINE V HighProduct(D d, V a, V multiplier) {
#if HWY_TARGET == HWY_SCALAR
  // One lane has no pairs.
  return hn::Set(d,
                 static_cast<uint32_t>(static_cast<uint64_t>(hn::GetLane(a)) *
                                           hn::GetLane(multiplier) >>
                                       32));
#else
  const hn::Repartition<uint64_t, D> d64;
  const auto even = hn::MulEven(a, multiplier);
  const auto odd = hn::MulEven(
      hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(d64, a))), multiplier);
  return hn::OddEven(hn::BitCast(d, odd),
                     hn::BitCast(d, hn::ShiftRight<32>(even)));
#endif
}

using PhiloxTag = hn::CappedTag<uint32_t, 64>;

// Words that PhiloxWords writes at a time; its buffer holds a multiple of it.
HWY_INLINE size_t PhiloxStep() { return 4 * hn::Lanes(PhiloxTag()); }

// Writes outputs [4 * block, 4 * block + RoundUp(count, PhiloxStep())) of the
// stream of `seed`.
HWY_INLINE void PhiloxWords(uint64_t seed, uint64_t block, size_t count,
                            uint32_t* HWY_RESTRICT words) {
  const PhiloxTag d;
  using V = hn::Vec<PhiloxTag>;
  const size_t lanes = hn::Lanes(d);
  const V multiplier0 = hn::Set(d, kPhiloxMultiplier0);
  const V multiplier1 = hn::Set(d, kPhiloxMultiplier1);
  for (size_t n = 0; n < count; n += 4 * lanes, block += lanes) {
    const uint32_t low = static_cast<uint32_t>(block);
    const uint32_t high = static_cast<uint32_t>(block >> 32);
    V c0 = hn::Add(hn::Set(d, low), hn::Iota(d, 0u));
    // Lanes whose low word wrapped around carry into the high one.
    V c1 = hn::IfThenElse(hn::Eq(hn::Max(c0, hn::Set(d, low)), c0),
                          hn::Set(d, high), hn::Set(d, high + 1));
    // Numbers of outputs, of which a block has four, are modulo 2^64.
    c1 = hn::And(c1, hn::Set(d, 0x3FFFFFFFu));
    V c2 = hn::Zero(d);
    V c3 = c2;
    uint32_t key0 = static_cast<uint32_t>(seed);
    uint32_t key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const V high0 = HighProduct(d, c0, multiplier0);
      const V high1 = HighProduct(d, c2, multiplier1);
      const V low0 = hn::Mul(c0, multiplier0);
      const V low1 = hn::Mul(c2, multiplier1);
      c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(d, key0));
      c1 = low1;
      c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(d, key1));
      c3 = low0;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
    hn::StoreInterleaved4(c0, c1, c2, c3, d, words + n);
  }
}

// The keys of the ten rounds, each in both halves of its word, for blocks that
// all have the same upper word: what the first two rounds make of that is in
// the keys of the two after.
struct PhiloxKeys {
  PhiloxKeys(uint64_t seed, uint32_t upper) {
    uint32_t key[20];
    for (uint32_t round = 0; round < 10; ++round) {
      key[2 * round] = static_cast<uint32_t>(seed) + round * kPhiloxWeyl0;
      key[2 * round + 1] =
          static_cast<uint32_t>(seed >> 32) + round * kPhiloxWeyl1;
    }
    const uint64_t product = uint64_t{kPhiloxMultiplier0} * (upper ^ key[0]);
    key[3] ^= static_cast<uint32_t>(product >> 32);
    key[5] ^= static_cast<uint32_t>(product);
    for (int i = 0; i < 20; ++i) word[i] = key[i] * 0x100000001u;
  }
  uint64_t word[20];
};

#if HWY_TARGET != HWY_SCALAR
// Rounds 0 to 8 of Philox on the blocks `block` with the upper word of `keys`:
// c1 and c3, and the products that the last round makes c0 and c2 of. Words are
// the low halves of lanes of 64 bits; the high halves hold what is left of
// products, which the next product ignores. So a round is two products, two
// moves and two three-way XORs.
template <class D64, class V64>
HWY_INLINE void PhiloxRounds(D64 d64, const PhiloxKeys& keys, V64 block,
                             V64& c1, V64& c3, V64& product0, V64& product1) {
  const hn::Repartition<uint32_t, D64> d32;
  const auto times = [=](V64 x, uint32_t multiplier) HWY_ATTR {
    return hn::MulEven(hn::BitCast(d32, x), hn::Set(d32, multiplier));
  };
  const auto key = [&](int i) HWY_ATTR { return hn::Set(d64, keys.word[i]); };
  // A shift and a shuffle: AVX-512 has one port for each.
  const auto shifted = [](V64 x) HWY_ATTR { return hn::ShiftRight<32>(x); };
  const auto swapped = [=](V64 x) HWY_ATTR {
    return hn::BitCast(d64, hn::Reverse2(d32, hn::BitCast(d32, x)));
  };
  // Round 0: c0 is the same for all blocks, c1 is 0.
  product0 = times(block, kPhiloxMultiplier0);
  V64 c2 = hn::Xor(swapped(product0), key(1));
  // Round 1: c2 is c3 but for its key, c3 the same for all blocks.
  c1 = times(c2, kPhiloxMultiplier1);
  V64 c0 = hn::Xor(shifted(c1), key(2));
  c2 = hn::Xor(product0, key(3));
  // Round 2.
  c3 = times(c0, kPhiloxMultiplier0);
  product1 = times(c2, kPhiloxMultiplier1);
  c0 = hn::Xor3(shifted(product1), c1, key(4));
  c2 = hn::Xor(swapped(c3), key(5));
  c1 = product1;
  for (int round = 3; round < 9; ++round) {
    product0 = times(c0, kPhiloxMultiplier0);
    product1 = times(c2, kPhiloxMultiplier1);
    c0 = hn::Xor3(shifted(product1), c1, key(2 * round));
    c2 = hn::Xor3(swapped(product0), c3, key(2 * round + 1));
    c1 = product1;
    c3 = product0;
  }
  product0 = times(c0, kPhiloxMultiplier0);
  product1 = times(c2, kPhiloxMultiplier1);
}

// The four words of blocks of rows 0, 2, 4... and of rows 1, 3, 5..., row by
// row.
template <class D32, class V64, class V32>
HWY_INLINE void PhiloxRows(D32 d32, const PhiloxKeys& keys, V64 even, V64 odd,
                           V32& word0, V32& word1, V32& word2, V32& word3) {
  const hn::Repartition<uint64_t, D32> d64;
  V64 even1, even3, even_product0, even_product1;
  V64 odd1, odd3, odd_product0, odd_product1;
  PhiloxRounds(d64, keys, even, even1, even3, even_product0, even_product1);
  PhiloxRounds(d64, keys, odd, odd1, odd3, odd_product0, odd_product1);
  const auto lows = [=](V64 e, V64 o) HWY_ATTR {
    return hn::OddEven(hn::Reverse2(d32, hn::BitCast(d32, o)),
                       hn::BitCast(d32, e));
  };
  // Of the odd rows they are where they belong.
  const auto highs = [=](V64 e, V64 o) HWY_ATTR {
    return hn::OddEven(hn::BitCast(d32, o),
                       hn::BitCast(d32, hn::ShiftRight<32>(e)));
  };
  const auto key = [&](int i) HWY_ATTR {
    return hn::BitCast(d32, hn::Set(d64, keys.word[i]));
  };
  word0 =
      hn::Xor3(highs(even_product1, odd_product1), lows(even1, odd1), key(18));
  word1 = lows(even_product1, odd_product1);
  word2 =
      hn::Xor3(highs(even_product0, odd_product0), lows(even3, odd3), key(19));
  word3 = lows(even_product0, odd_product0);
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
