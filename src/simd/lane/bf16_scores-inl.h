// SPDX-License-Identifier: Apache-2.0

// The scores of a block as pairs of bf16 (score_arrays-inl.h): what the fused
// passes make of f32 scores is rounded and interleaved in registers.

// Included for one Highway target only, bf16dot_target.h.
#ifndef FA2_SRC_SIMD_LANE_BF16_SCORES_INL_H_
#define FA2_SRC_SIMD_LANE_BF16_SCORES_INL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "src/simd/lane/bf16_pairs-inl.h"
#include "src/simd/lane/score_arrays-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// S and dP are those of one strip of a panel at a time.
template <size_t kTerms>
class BackwardScores<Bf16Pairs<kTerms>> {
 public:
  BackwardScores(void* scratch, size_t width, size_t keys, size_t queries)
      : panel_(keys * width),
        block_(keys * queries),
        s_(static_cast<float*>(scratch)),
        dp_(s_ + panel_),
        ds_right_(reinterpret_cast<uint32_t*>(dp_ + panel_)),
        left_(reinterpret_cast<uint16_t*>(ds_right_ + panel_ / 2)) {}

  static size_t Bytes(size_t width, size_t keys, size_t queries) {
    return keys * width * (2 * sizeof(float) + sizeof(uint16_t)) +
           keys * queries * (kTerms + 1) * sizeof(uint16_t);
  }

  // S and dP of 48 keys (8 register blocks) are 24 KiB, which with their right
  // operands should fit a 48 KiB L1: D 64 2% faster than all 96 keys at once,
  // and D 256, where they do not fit, 1% slower.
  static size_t StripKeys(size_t keys, size_t right_bytes) {
    return right_bytes <= (20 << 10) ? std::min<size_t>(48, keys) : keys;
  }

  float* s(size_t /*panel*/) const { return s_; }
  float* dp(size_t /*panel*/) const { return dp_; }

  // P and dS of rows `key` and `key` + 1, two vectors each.
  template <class D>
  HWY_INLINE void Store(D d, size_t panel, size_t key, size_t col,
                        hn::Vec<D> p00, hn::Vec<D> p01, hn::Vec<D> p10,
                        hn::Vec<D> p11, hn::Vec<D> ds00, hn::Vec<D> ds01,
                        hn::Vec<D> ds10, hn::Vec<D> ds11) const {
    const hn::Repartition<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> du;
    const size_t at = key * PanelWidth(d) + col;
    uint16_t* p = left_ + panel * panel_ + at;
    uint16_t* ds = p + kTerms * block_;
    for (size_t term = 0; term < kTerms; ++term, p += block_) {
      const auto even = RoundTwo(d, p00, p01);
      const auto odd = RoundTwo(d, p10, p11);
      hn::Store(even, d16, p);
      hn::Store(odd, d16, p + PanelWidth(d));
      if (term + 1 < kTerms) {
        Rest(d, even, p00, p01);
        Rest(d, odd, p10, p11);
      }
    }
    const auto even = RoundTwo(d, ds00, ds01);
    const auto odd = RoundTwo(d, ds10, ds11);
    hn::Store(even, d16, ds);
    hn::Store(odd, d16, ds + PanelWidth(d));
    PairsVec<D> low, high;
    Interleave(d, even, odd, low, high);
    uint32_t* pairs = ds_right_ + key / 2 * PanelWidth(d) + col;
    hn::Store(low, du, pairs);
    hn::Store(high, du, pairs + hn::Lanes(d));
  }

  // Zeros for the keys [begin, end).
  template <class D>
  void Clear(D d, size_t panel, size_t begin, size_t end) const {
    const size_t width = PanelWidth(d);
    const size_t count = (end - begin) * width;
    uint16_t* left = left_ + panel * panel_ + begin * width;
    for (size_t i = 0; i <= kTerms; ++i) {
      std::fill_n(left + i * block_, count, uint16_t{0});
    }
    std::fill_n(ds_right_ + begin / 2 * width, count / 2, 0u);
  }

  const uint32_t* p(size_t term) const {
    return reinterpret_cast<const uint32_t*>(left_ + term * block_);
  }
  const uint32_t* ds() const { return p(kTerms); }
  const uint32_t* ds_right(size_t /*panel*/) const { return ds_right_; }

 private:
  size_t panel_, block_;
  float *s_, *dp_;
  uint32_t* ds_right_;
  uint16_t* left_;  // the terms of P, then dS
};

template <size_t kTerms>
class ForwardScores<Bf16Pairs<kTerms>> {
 public:
  ForwardScores(void* scratch, size_t width, size_t keys)
      : panel_(keys * width),
        s_(static_cast<float*>(scratch)),
        pairs_(reinterpret_cast<uint32_t*>(s_ + panel_)) {}

  static size_t Bytes(size_t width, size_t keys) {
    return keys * width * (sizeof(float) + kTerms * sizeof(uint16_t));
  }

  float* s() const { return s_; }

  // P of a vector of rows `key` and `key` + 1. Adds their sum as the products
  // will take it to `weight`.
  template <class D>
  HWY_INLINE void Store(D d, size_t key, size_t col, hn::Vec<D> even,
                        hn::Vec<D> odd, hn::Vec<D>& weight) const {
    using Op = Bf16Pairs<kTerms>;
    constexpr uint32_t kOnes = 0x3F803F80;
    uint32_t* to = pairs_ + key / 2 * PanelWidth(d) + col;
    for (size_t term = 0; term < kTerms; ++term, to += panel_ / 2) {
      const auto rounded = RoundTwo(d, even, odd);
      const auto pairs = InterleaveHalves(d, rounded);
      hn::Store(pairs, hn::RebindToUnsigned<D>(), to);
      weight = Op::Accumulate(Op::Left(d, &kOnes), pairs, weight);
      if (term + 1 < kTerms) Rest(d, rounded, even, odd);
    }
  }

  const uint32_t* p(size_t term) const { return pairs_ + term * (panel_ / 2); }

 private:
  size_t panel_;
  float* s_;
  uint32_t* pairs_;
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_LANE_BF16_SCORES_INL_H_
