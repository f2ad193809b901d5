// Pairs of bf16 for LaneEngine: a 32-bit lane holds two neighbours along the
// summed dimension, the first in its low half, and one instruction adds both
// products to an f32 lane.

// Included for one Highway target only, bf16dot_target.h.
#ifndef FA2_SRC_SIMD_BF16_PAIRS_INL_H_
#define FA2_SRC_SIMD_BF16_PAIRS_INL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "src/simd/engine.h"
#include "src/simd/load-inl.h"
#include "src/simd/pack-inl.h"
#include "src/simd/score_arrays-inl.h"
#include "src/simd/store-inl.h"

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
  static constexpr size_t kPerLane = 2;
  static constexpr size_t kTerms = kTermsOfP;

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

// Two vectors of a row as bf16, to nearest even.
template <class D>
HWY_INLINE void StoreRounded(D d, hn::Vec<D> low, hn::Vec<D> high,
                             uint16_t* HWY_RESTRICT out) {
#if HWY_ARCH_X86
  (void)d;
  const hn::Repartition<uint16_t, D> d16;
  hn::Vec<decltype(d16)> rounded;
  asm("vcvtne2ps2bf16 %1, %2, %0"
      : "=v"(rounded.raw)
      : "v"(low.raw), "v"(high.raw));
  hn::StoreU(rounded, d16, out);
#else
  StoreNarrow(d, StoredBF16(), low, out);
  StoreNarrow(d, StoredBF16(), high, out + hn::Lanes(d));
#endif
}

// A row of `width` f32, a multiple of two vectors, as bf16; `rest`, if not
// nullptr, gets what rounding took away and may be `row` itself.
template <class D>
HWY_INLINE void RoundRow(D d, const float* row, size_t width,
                         uint16_t* HWY_RESTRICT out, float* rest = nullptr) {
  const size_t lanes = hn::Lanes(d);
  for (size_t col = 0; col < width; col += 2 * lanes) {
    const auto low = hn::Load(d, row + col);
    const auto high = hn::Load(d, row + col + lanes);
    StoreRounded(d, low, high, out + col);
    if (rest == nullptr) continue;
    for (size_t c = col; c < col + 2 * lanes; c += lanes) {
      hn::Store(
          hn::Sub(hn::Load(d, row + c), LoadWide(d, StoredBF16(), out + c)), d,
          rest + c);
    }
  }
}

// Pairs of two rows of `width` bf16, whole vectors of d.
template <class D>
HWY_INLINE void InterleaveRows(D d, const uint16_t* HWY_RESTRICT even,
                               const uint16_t* HWY_RESTRICT odd, size_t width,
                               uint32_t* HWY_RESTRICT pairs) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  for (size_t col = 0; col < width; col += hn::Lanes(d)) {
    const auto low = hn::PromoteTo(du, hn::LoadU(d16, even + col));
    const auto high = hn::PromoteTo(du, hn::LoadU(d16, odd + col));
    hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), du, pairs + col);
  }
}

// Copies `count` bf16 and fills up to `padded` with zeros. With finite_only
// those that are not finite become 0. Returns whether all are finite.
inline bool CopyBf16(const uint16_t* HWY_RESTRICT from, size_t count,
                     size_t padded, bool finite_only,
                     uint16_t* HWY_RESTRICT to) {
  constexpr uint16_t kExponent = 0x7F80;
  uint16_t bad = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint16_t x = from[i];
    const uint16_t non_finite = (x & kExponent) == kExponent ? 0xFFFF : 0;
    bad |= non_finite;
    to[i] = finite_only ? static_cast<uint16_t>(x & ~non_finite) : x;
  }
  std::fill_n(to + count, padded - count, uint16_t{0});
  return bad == 0;
}

template <size_t kTerms>
struct LanePacker<Bf16Pairs<kTerms>> {
  template <class D>
  static HWY_INLINE bool AlongRow(D d, StoredBF16, const uint16_t* row,
                                  size_t depth, bool finite_only,
                                  uint32_t* HWY_RESTRICT out) {
    const size_t padded = 2 * ScoreStride<Bf16Pairs<kTerms>>(d, depth);
    return CopyBf16(row, depth, padded, finite_only,
                    reinterpret_cast<uint16_t*>(out));
  }
  template <class D>
  static HWY_INLINE bool AcrossRows(D d, StoredBF16, const uint16_t* first,
                                    int64_t row_stride, size_t rows,
                                    size_t columns, bool finite_only,
                                    uint32_t* HWY_RESTRICT out) {
    constexpr size_t kPart = 256;
    HWY_ALIGN uint16_t even[kPart], odd[kPart];
    bool finite = true;
    for (size_t c0 = 0; c0 < columns; c0 += kPart) {
      const size_t count = std::min(kPart, columns - c0);
      const size_t padded = RowStride(d, count);
      finite &= CopyBf16(first + c0, count, padded, finite_only, even);
      finite &= CopyBf16(first + c0 + (rows > 1 ? row_stride : 0),
                         rows > 1 ? count : 0, padded, finite_only, odd);
      InterleaveRows(d, even, odd, padded, out + c0);
    }
    return finite;
  }
};

// The scores of one panel are f32 until its fused pass is through.
template <size_t kTerms>
class BackwardScores<Bf16Pairs<kTerms>> {
 public:
  BackwardScores(void* scratch, size_t width, size_t keys, size_t queries)
      : width_(width),
        panel_(keys * width),
        block_(keys * queries),
        s_(static_cast<float*>(scratch)),
        dp_(s_ + panel_),
        ds_right_(reinterpret_cast<uint32_t*>(dp_ + panel_)),
        left_(reinterpret_cast<uint16_t*>(ds_right_ + panel_ / 2)) {}

  static size_t Bytes(size_t width, size_t keys, size_t queries) {
    return keys * width * (2 * sizeof(float) + sizeof(uint16_t)) +
           keys * queries * (kTerms + 1) * sizeof(uint16_t);
  }

  float* s(size_t /*panel*/) const { return s_; }
  float* dp(size_t /*panel*/) const { return dp_; }

  template <class D>
  void Finish(D d, size_t panel, size_t begin, size_t end) const {
    uint16_t* p = left_ + panel * panel_;
    uint16_t* ds = p + kTerms * block_;
    for (size_t key = begin; key < end; key += 2) {
      const size_t even = key * width_;
      const size_t odd = even + width_;
      for (size_t at : {even, odd}) {
        RoundRow(d, s_ + at, width_, p + at, kTerms > 1 ? s_ + at : nullptr);
        if (kTerms > 1) RoundRow(d, s_ + at, width_, p + block_ + at);
        RoundRow(d, dp_ + at, width_, ds + at);
      }
      InterleaveRows(d, ds + even, ds + odd, width_, ds_right_ + even / 2);
    }
  }

  const uint32_t* p(size_t term) const {
    return reinterpret_cast<const uint32_t*>(left_ + term * block_);
  }
  const uint32_t* ds() const { return p(kTerms); }
  const uint32_t* ds_right(size_t /*panel*/) const { return ds_right_; }

 private:
  size_t width_, panel_, block_;
  float *s_, *dp_;
  uint32_t* ds_right_;
  uint16_t* left_;  // the terms of P, then dS
};

template <size_t kTerms>
class ForwardScores<Bf16Pairs<kTerms>> {
 public:
  ForwardScores(void* scratch, size_t width, size_t keys)
      : width_(width),
        panel_(keys * width),
        s_(static_cast<float*>(scratch)),
        pairs_(reinterpret_cast<uint32_t*>(s_ + panel_)),
        rows_(reinterpret_cast<uint16_t*>(pairs_ + kTerms * panel_ / 2)) {}

  static size_t Bytes(size_t width, size_t keys) {
    return keys * width * (sizeof(float) + kTerms * sizeof(uint16_t)) +
           2 * width * sizeof(uint16_t);
  }

  float* s() const { return s_; }

  template <class D>
  void Finish(D d, size_t begin, size_t end, float* row_weight) const {
    using Op = Bf16Pairs<kTerms>;
    for (size_t term = 0; term < kTerms; ++term) {
      uint32_t* pairs = pairs_ + term * (panel_ / 2);
      for (size_t key = begin; key < end; key += 2) {
        for (size_t i = 0; i < 2; ++i) {
          float* row = s_ + (key + i) * width_;
          RoundRow(d, row, width_, rows_ + i * width_,
                   term + 1 < kTerms ? row : nullptr);
        }
        InterleaveRows(d, rows_, rows_ + width_, width_,
                       pairs + key / 2 * width_);
      }
    }
    if (row_weight == nullptr) return;
    constexpr uint32_t kOnes = 0x3F803F80;
    for (size_t col = 0; col < width_; col += hn::Lanes(d)) {
      auto sum = hn::Load(d, row_weight + col);
      for (size_t pair = begin / 2; pair < end / 2; ++pair) {
        sum = Op::Accumulate(Op::Left(d, &kOnes),
                             Op::Right(d, pairs_ + pair * width_ + col), sum);
      }
      hn::Store(sum, d, row_weight + col);
    }
  }

  const uint32_t* p(size_t term) const { return pairs_ + term * (panel_ / 2); }

 private:
  size_t width_, panel_;
  float* s_;
  uint32_t* pairs_;
  uint16_t* rows_;  // two
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_BF16_PAIRS_INL_H_
