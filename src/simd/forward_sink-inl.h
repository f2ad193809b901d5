// S of the forward pass on its way out of the registers of its product: P
// without a trip through memory, where all of a panel is visible and no option
// but the scale is used.
//
// It spares the pass over S for its maxima, and stores: beside FMAs and dots
// one of 512 bits costs Zen 5 a cycle, in which it does two of those. Bf16Dot
// is 1 to 4% faster for it, D 256 to D 64, F32Fma 2%.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_FORWARD_SINK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_FORWARD_SINK_INL_H_
#undef FA2_SRC_SIMD_FORWARD_SINK_INL_H_
#else
#define FA2_SRC_SIMD_FORWARD_SINK_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/score_arrays-inl.h"
#include "src/simd/score_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// P = exp(S - maximum), stored as the operand of O, and its sums.
template <class Op>
struct ForwardSink {
  using T = typename Op::Sum;
  static constexpr bool kIsMemory = false;
  PanelOptions<T> options;
  ForwardScores<Op> scores;
  const T* shift;  // [W], Shift of the maxima
  T* sum;          // [W], added to: P
  T* weight;       // [W], added to: P as the products take pairs of it
  size_t key;      // row 0 of the next register block

  void Advance(size_t rows) { key += rows; }

  template <size_t kRows, class D, class V>
  HWY_INLINE void Column(D d, size_t col, V s0, V s1, V s2, V s3, V s4,
                         V s5) const {
    const V by = hn::Load(d, shift + col);
    V total = hn::Load(d, sum + col);
    V rounded = Op::kPerLane == 1 ? hn::Zero(d) : hn::Load(d, weight + col);
    const auto two = [&](size_t row, V s_even, V s_odd) HWY_ATTR {
      const V even = Probability<Op::kForwardExpDegree, false, false>(
          d, options, s_even, by);
      const V odd = Probability<Op::kForwardExpDegree, false, false>(d, options,
                                                                     s_odd, by);
      total = hn::Add(total, hn::Add(even, odd));
      if constexpr (Op::kPerLane == 1) {
        scores.Store(d, key + row, col, even);
        scores.Store(d, key + row + 1, col, odd);
      } else {
        scores.Store(d, key + row, col, even, odd, rounded);
      }
    };
    two(0, s0, s1);
    if constexpr (kRows > 2) two(2, s2, s3);
    if constexpr (kRows > 4) two(4, s4, s5);
    hn::Store(total, d, sum + col);
    if constexpr (Op::kPerLane > 1) hn::Store(rounded, d, weight + col);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
