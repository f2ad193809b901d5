// SPDX-License-Identifier: Apache-2.0

// S of the forward pass on its way out of the registers of its product: P
// without a trip through memory, where all of a panel is visible and no option
// but the scale is used.
//
// It spares the pass over S for its maxima, and stores: beside FMAs and dots
// one of 512 bits costs Zen 5 a cycle, in which it does two of those. Bf16Dot
// is 1 to 4% faster for it, D 256 to D 64, F32Fma 2%.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_FORWARD_SINK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_FORWARD_SINK_INL_H_
#undef FA2_SRC_SIMD_LANE_FORWARD_SINK_INL_H_
#else
#define FA2_SRC_SIMD_LANE_FORWARD_SINK_INL_H_
#endif

#include <cstddef>
#include <type_traits>

#include "hwy/highway.h"
#include "src/simd/lane/score_arrays-inl.h"
#include "src/simd/lane/score_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// P = exp(S - maximum), stored as the operand of O, and its sums.
template <class Op>
struct ForwardSink {
  using T = typename Op::Sum;
  static constexpr bool kIsMemory = false;
  // By staggered_blocks-inl.h. Not where P stays as it is, whose exponentials
  // are longer and whose products take twice the time: f32 and `exact` gain
  // nothing by it on Zen 5, and f32 loses 6% on Emerald Rapids, since each half
  // loads its own vectors of A.
  static constexpr bool kStaggers = Op::kPerLane > 1 && kBlockVectors == 4;
  // Two halves of a register block, and what is made of one of them, leave no
  // register for constants.
  using Constants = std::conditional_t<kStaggers, Read, Held>;
  PanelOptions<T> options;
  ForwardScores<Op> scores;
  const T* shift;  // [W], Shift of the maxima
  T* sum;          // [W], added to: P
  T* weight;       // [W], added to: P as the products take pairs of it
  size_t key;      // row 0 of the next register block

  void Advance(size_t rows) { key += rows; }

  // The sums of columns [col, col + lanes), to which Pair adds.
  template <class D>
  HWY_INLINE void Open(D d, size_t col, hn::Vec<D>& total,
                       hn::Vec<D>& rounded) const {
    total = hn::Load(d, sum + col);
    rounded = Op::kPerLane == 1 ? total : hn::Load(d, weight + col);
  }
  template <class D>
  HWY_INLINE void Close(D d, size_t col, hn::Vec<D> total,
                        hn::Vec<D> rounded) const {
    hn::Store(total, d, sum + col);
    if constexpr (Op::kPerLane > 1) hn::Store(rounded, d, weight + col);
  }

  // S of rows `row` and `row` + 1 of the register block.
  template <class D>
  HWY_INLINE void Pair(D d, size_t row, size_t col, hn::Vec<D> s_even,
                       hn::Vec<D> s_odd, hn::Vec<D>& total,
                       hn::Vec<D>& rounded) const {
    const auto by = hn::Load(d, shift + col);
    const auto even =
        Probability<Op::kForwardExpDegree, false, false, Constants>(d, options,
                                                                    s_even, by);
    const auto odd =
        Probability<Op::kForwardExpDegree, false, false, Constants>(d, options,
                                                                    s_odd, by);
    total = hn::Add(total, hn::Add(even, odd));
    if constexpr (Op::kPerLane == 1) {
      scores.Store(d, key + row, col, even);
      scores.Store(d, key + row + 1, col, odd);
    } else {
      scores.Store(d, key + row, col, even, odd, rounded);
    }
  }

  template <size_t kRows, class D, class V>
  HWY_INLINE void Column(D d, size_t col, V s0, V s1, V s2, V s3, V s4,
                         V s5) const {
    V total, rounded;
    Open(d, col, total, rounded);
    Pair(d, 0, col, s0, s1, total, rounded);
    if constexpr (kRows > 2) Pair(d, 2, col, s2, s3, total, rounded);
    if constexpr (kRows > 4) Pair(d, 4, col, s4, s5, total, rounded);
    Close(d, col, total, rounded);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
