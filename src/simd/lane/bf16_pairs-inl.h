// SPDX-License-Identifier: Apache-2.0

// Pairs of bf16 for LaneEngine: a 32-bit lane holds two neighbours along the
// summed dimension, the first in its low half, and one instruction adds both
// products to an f32 lane. How they are made, in registers and when packed.

// Included for one Highway target only, bf16dot_target.h.
#ifndef FA2_SRC_SIMD_LANE_BF16_PAIRS_INL_H_
#define FA2_SRC_SIMD_LANE_BF16_PAIRS_INL_H_

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "src/simd/engine.h"
#include "src/simd/lane/pack-inl.h"
#include "src/simd/math/load-inl.h"
#include "src/simd/math/store-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// How a product multiplies pairs (see MultiplyAdd). VDPBF16PS rounds after each
// of the two products and takes subnormal numbers as 0.
template <size_t kTermsOfP>
struct Bf16Pairs {
  using Element = uint32_t;
  using Sum = float;
  using Scores = Bf16Pairs;
  static constexpr size_t kPerLane = 2;
  static constexpr size_t kTerms = kTermsOfP;
  // Rounding costs P 2^-9, with two terms 2^-17. The logsumexp is not rounded:
  // degree 3 errs by 7.5e-5 there.
  static constexpr int kExpDegree = kTermsOfP == 1 ? 3 : 4;
  static constexpr int kForwardExpDegree = 4;

  template <class D>
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> Right(
      D /*d*/, const uint32_t* HWY_RESTRICT b) {
    return hn::Load(hn::RebindToUnsigned<D>(), b);
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> Left(
      D /*d*/, const uint32_t* HWY_RESTRICT a) {
    return hn::Set(hn::RebindToUnsigned<D>(), *a);
  }
  template <class Pairs, class V>
  static HWY_INLINE V Accumulate(Pairs a, Pairs b, V sum) {
#if HWY_ARCH_X86
    // Highway has the instruction from 1.1, for targets that GCC 12 lacks.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
#else
    const hn::DFromV<V> d;
    const hn::Repartition<hwy::bfloat16_t, decltype(d)> d16;
    // Highway's reordering is none where the instruction exists.
    V unused = hn::Zero(d);
    return hn::ReorderWidenMulAccumulate(d, hn::BitCast(d16, a),
                                         hn::BitCast(d16, b), sum, unused);
#endif
  }
  template <class Visitor>
  static HWY_INLINE void WithInput(DType /*bf16*/, const Visitor& visit) {
    visit(StoredBF16());
  }
};

// Pairs for the products of inputs alone, S and dP, which they give to f32's
// precision; P and dS stay f32.
struct Bf16ScorePairs : MultiplyAdd<float> {
  using Scores = Bf16Pairs<1>;
};

template <class D>
using Bf16Vec = hn::Vec<hn::Repartition<uint16_t, D>>;
template <class D>
using PairsVec = hn::Vec<hn::RebindToUnsigned<D>>;

// Two vectors as bf16, to nearest even, `low` first.
template <class D>
HWY_INLINE Bf16Vec<D> RoundTwo(D d, hn::Vec<D> low, hn::Vec<D> high) {
#if HWY_ARCH_X86
  (void)d;
  Bf16Vec<D> rounded;
  asm("vcvtne2ps2bf16 %1, %2, %0"
      : "=v"(rounded.raw)
      : "v"(low.raw), "v"(high.raw));
  return rounded;
#else
  const hn::Repartition<uint16_t, D> d16;
  return hn::Combine(d16, NarrowToBf16(d, high), NarrowToBf16(d, low));
#endif
}

#if HWY_ARCH_X86
// Indices of words: first, second, first + 1, second + 1, ...
struct WordOrder {
  uint16_t word[32];
};
constexpr WordOrder Alternate(uint16_t first, uint16_t second) {
  WordOrder order{};
  for (uint16_t i = 0; i < 16; ++i) {
    order.word[2 * i] = static_cast<uint16_t>(first + i);
    order.word[2 * i + 1] = static_cast<uint16_t>(second + i);
  }
  return order;
}
// Those of a second vector begin at 32.
alignas(64) inline constexpr WordOrder kLowerWords = Alternate(0, 32);
alignas(64) inline constexpr WordOrder kUpperWords = Alternate(16, 48);
alignas(64) inline constexpr WordOrder kHalvesOfWords = Alternate(0, 16);
#endif

// What rounding took away from `low` and `high`.
template <class D>
HWY_INLINE void Rest(D d, Bf16Vec<D> rounded, hn::Vec<D>& low,
                     hn::Vec<D>& high) {
  const hn::RebindToUnsigned<D> du;
  const hn::Repartition<uint16_t, D> d16;
  const auto wide = [&](auto half) HWY_ATTR {
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, half)));
  };
  low = hn::Sub(low, wide(hn::LowerHalf(rounded)));
  high = hn::Sub(high, wide(hn::UpperHalf(hn::Half<decltype(d16)>(), rounded)));
}

// Pairs of the lanes of two rows: of their first halves, and of their second.
template <class D>
HWY_INLINE void Interleave(D /*d*/, Bf16Vec<D> even, Bf16Vec<D> odd,
                           PairsVec<D>& low, PairsVec<D>& high) {
#if HWY_ARCH_X86
  low.raw = _mm512_permutex2var_epi16(even.raw, _mm512_load_si512(&kLowerWords),
                                      odd.raw);
  high.raw = _mm512_permutex2var_epi16(
      even.raw, _mm512_load_si512(&kUpperWords), odd.raw);
#else
  const hn::Repartition<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> du;
  low = hn::BitCast(du, hn::InterleaveLower(d16, even, odd));
  high = hn::BitCast(du, hn::InterleaveUpper(d16, even, odd));
#endif
}

// Pairs of the lanes of the first and the second half of one vector.
template <class D>
HWY_INLINE PairsVec<D> InterleaveHalves(D /*d*/, Bf16Vec<D> v) {
#if HWY_ARCH_X86
  return PairsVec<D>{
      _mm512_permutexvar_epi16(_mm512_load_si512(&kHalvesOfWords), v.raw)};
#else
  const hn::Repartition<uint16_t, D> d16;
  return hn::BitCast(
      hn::RebindToUnsigned<D>(),
      hn::InterleaveLower(d16, v, hn::ConcatUpperUpper(d16, v, v)));
#endif
}

// The first `count` bf16 of a row, at most a vector of them, zeros behind them.
// `greatest` becomes the maximum of itself and their exponent bits; with
// finite_only those that are not finite become 0.
template <class D16>
HWY_INLINE hn::Vec<D16> LoadBf16(D16 d16, const uint16_t* HWY_RESTRICT p,
                                 size_t count, bool finite_only,
                                 hn::Vec<D16>& greatest) {
  const auto exponent = hn::Set(d16, ExponentBits(StoredBF16()));
  const auto x = LoadUpTo(d16, p, count);
  const auto bits = hn::And(x, exponent);
  greatest = hn::Max(greatest, bits);
  return finite_only ? hn::IfThenZeroElse(hn::Eq(bits, exponent), x) : x;
}

// Whether LoadBf16 has met finite elements only.
template <class D16>
HWY_INLINE bool AllFinite(D16 d16, hn::Vec<D16> greatest) {
  return hn::AllTrue(
      d16, hn::Lt(greatest, hn::Set(d16, ExponentBits(StoredBF16()))));
}

template <size_t kTerms>
struct LanePacker<Bf16Pairs<kTerms>> {
  template <class D>
  static HWY_INLINE bool AlongRows(D /*d*/, StoredBF16, const uint16_t* first,
                                   int64_t row_stride, size_t rows,
                                   size_t depth, bool finite_only,
                                   uint32_t* HWY_RESTRICT out) {
    const hn::Repartition<uint16_t, D> d16;
    const size_t lanes = hn::Lanes(d16);
    auto* to = reinterpret_cast<uint16_t*>(out);
    auto greatest = hn::Zero(d16);
    for (size_t r = 0; r < rows; ++r) {
      const uint16_t* row = first + static_cast<int64_t>(r) * row_stride;
      for (size_t i = 0; i < depth; i += lanes, to += lanes) {
        hn::Store(LoadBf16(d16, row + i, depth - i, finite_only, greatest), d16,
                  to);
      }
    }
    return AllFinite(d16, greatest);
  }
  template <class D>
  static HWY_INLINE bool Finite(D /*d*/, StoredBF16, const uint16_t* first,
                                int64_t row_stride, size_t rows, size_t depth) {
    const hn::Repartition<uint16_t, D> d16;
    auto greatest = hn::Zero(d16);
    for (size_t r = 0; r < rows; ++r) {
      const uint16_t* row = first + static_cast<int64_t>(r) * row_stride;
      for (size_t i = 0; i < depth; i += hn::Lanes(d16)) {
        LoadBf16(d16, row + i, depth - i, false, greatest);
      }
    }
    return AllFinite(d16, greatest);
  }
  template <class D>
  static HWY_INLINE bool AcrossRows(D d, StoredBF16, const uint16_t* first,
                                    int64_t row_stride, size_t rows,
                                    size_t columns, bool finite_only,
                                    uint32_t* HWY_RESTRICT out) {
    const hn::Repartition<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> du;
    const size_t lanes = hn::Lanes(d);
    const size_t stride = RowStride(d, columns);
    auto greatest = hn::Zero(d16);
    for (size_t r = 0; r < rows; r += 2) {
      const uint16_t* row = first + static_cast<int64_t>(r) * row_stride;
      for (size_t c = 0; c < columns; c += 2 * lanes) {
        const size_t left = columns - c;
        const auto even = LoadBf16(d16, row + c, left, finite_only, greatest);
        auto odd = hn::Zero(d16);
        if (r + 1 < rows) {
          odd =
              LoadBf16(d16, row + row_stride + c, left, finite_only, greatest);
        }
        PairsVec<D> low, high;
        Interleave(d, even, odd, low, high);
        hn::Store(low, du, out + c);
        if (left > lanes) hn::Store(high, du, out + c + lanes);
      }
      out += stride;
    }
    return AllFinite(d16, greatest);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_LANE_BF16_PAIRS_INL_H_
