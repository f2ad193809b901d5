// Philox4x32-10 (Salmon et al. 2011) on vectors, one block a lane: of one
// stream, or of rows that lie apart.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_PHILOX_INL_H_
#undef FA2_SRC_SIMD_PHILOX_INL_H_
#else
#define FA2_SRC_SIMD_PHILOX_INL_H_
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

// The keys of the ten rounds of a seed.
struct PhiloxKeys {
  explicit PhiloxKeys(uint64_t seed) {
    uint32_t key0 = static_cast<uint32_t>(seed);
    uint32_t key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      word[2 * round] = key0;
      word[2 * round + 1] = key1;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
  }
  uint64_t word[20];
};

#if HWY_TARGET != HWY_SCALAR
// The four words of the blocks `block`, in the low halves of lanes of 64 bits;
// the high halves hold what is left of products, which the next product
// ignores. So a round is two products, two moves and two three-way XORs.
template <class D64, class V64>
HWY_INLINE void PhiloxBlocks(D64 d64, const PhiloxKeys& keys, V64 block,
                             V64& c0, V64& c1, V64& c2, V64& c3) {
  const hn::Repartition<uint32_t, D64> d32;
  const auto multiplier0 = hn::Set(d32, kPhiloxMultiplier0);
  const auto multiplier1 = hn::Set(d32, kPhiloxMultiplier1);
  // c2 and c3 are 0 before the first round.
  const V64 first = hn::MulEven(hn::BitCast(d32, block), multiplier0);
  c0 = hn::Xor(hn::ShiftRight<32>(block), hn::Set(d64, keys.word[0]));
  c1 = hn::Zero(d64);
  c2 = hn::Xor(hn::ShiftRight<32>(first), hn::Set(d64, keys.word[1]));
  c3 = first;
  for (int round = 1; round < 10; ++round) {
    const V64 product0 = hn::MulEven(hn::BitCast(d32, c0), multiplier0);
    const V64 product1 = hn::MulEven(hn::BitCast(d32, c2), multiplier1);
    // A shift and a shuffle: AVX-512 has one port for each.
    const V64 high1 = hn::ShiftRight<32>(product1);
    const V64 high0 =
        hn::BitCast(d64, hn::Reverse2(d32, hn::BitCast(d32, product0)));
    c0 = hn::Xor3(high1, c1, hn::Set(d64, keys.word[2 * round]));
    c1 = product1;
    c2 = hn::Xor3(high0, c3, hn::Set(d64, keys.word[2 * round + 1]));
    c3 = product0;
  }
}

// Word `w` of rows 0, 2, 4... and of rows 1, 3, 5... as one vector of 32 bits.
template <class D32, class V64>
HWY_INLINE hn::Vec<D32> PhiloxWord(D32 d32, V64 even, V64 odd) {
  return hn::OddEven(hn::Reverse2(d32, hn::BitCast(d32, odd)),
                     hn::BitCast(d32, even));
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
