// exp for softmax: arguments are never positive, -inf and NaN are as they
// should be.

#if defined(FA2_SRC_OPS_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_OPS_EXP_INL_H_
#undef FA2_SRC_OPS_EXP_INL_H_
#else
#define FA2_SRC_OPS_EXP_INL_H_
#endif

#include <cmath>
#include <cstddef>
#include <limits>

#include "hwy/highway.h"
#include "src/ops/exp_scratch.h"
#include "src/ops/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// exp(x) for x <= 0, relative error 1.2e-7; results below 2^-125.5 become 0.
template <class D>
HWY_INLINE hn::Vec<D> ExpNonPositive(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  // x = k ln 2 + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to a whole
  // number and leaves it in the low bits.
  const auto magic = hn::Set(d, 12582912.0f);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504088896341f), magic);
  const auto k = hn::Sub(shifted, magic);
  // ln 2 in two parts, the first with so many zero bits at its end that its
  // product with k is exact.
  auto r = hn::NegMulAdd(k, hn::Set(d, 0.693145751953125f), x);
  r = hn::NegMulAdd(k, hn::Set(d, 1.428606765330187e-6f), r);
  // 1 + r + r^2 q(r), q of degree 4 with the least greatest relative error on
  // that interval, 3e-9.
  auto p = hn::Set(d, 0.0013814599f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.008368717f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.04166839f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.16666521f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.49999994f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  // A product, not an addition to the exponent's bits: NaN stays NaN.
  const auto power = hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, shifted)),
                             hn::BitCast(di, hn::Set(d, 1.0f)));
  const auto y = hn::Mul(p, hn::BitCast(d, power));
  // -125.5 ln 2: k is -125 or more, so the result is normal. Not "keep if
  // greater": a NaN must come through.
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -86.98997f)), y);
}

// Of a row: its maximum and sum(exp(x - max)). A NaN or +inf in the row makes
// the sum NaN; a row of only -inf has maximum -inf and sum 0.
struct RowExpSum {
  float max;
  double sum;
};

// Leaves exp(x - shift) in `scratch` for ScaleExpOfRow, shift being the maximum
// of the row up to the end of the chunk.
template <class D, typename T>
HWY_INLINE RowExpSum SumExpOfRow(D d, const T* x, size_t n, float* scratch) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const size_t lanes = hn::Lanes(d);
  float* const shifts = scratch + ExpChunks(n) * kExpChunk;
  RowExpSum row = {-kInf, 0.0};
  for (size_t chunk = 0; chunk < n; chunk += kExpChunk) {
    const T* HWY_RESTRICT p = x + chunk;
    const size_t count = HWY_MIN(kExpChunk, n - chunk);
    auto max0 = hn::Set(d, -kInf);
    auto max1 = max0;
    size_t i = 0;
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      max0 = hn::Max(max0, LoadVector(d, p + i));
      max1 = hn::Max(max1, LoadVector(d, p + i + lanes));
    }
    for (; i < count; i += lanes) {
      max0 = hn::Max(max0, LoadUpTo(d, p + i, count - i, -kInf));
    }
    const float max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(max0, max1)));
    if (max > row.max) {
      row.sum *= std::exp(static_cast<double>(row.max) - max);
      row.max = max;
    }
    // Whether Max lets a NaN through differs between targets, but x - shift is
    // NaN wherever x is, and a shift of NaN makes all of them NaN. With only
    // -inf so far any finite shift gives exp = 0.
    const float shift = max != max ? max : row.max;
    const auto shift_lanes = hn::Set(d, shift == -kInf ? 0.0f : shift);
    float* HWY_RESTRICT to = scratch + chunk;
    row.sum += SumRow(d, count, [&](size_t at, size_t left) HWY_ATTR {
      const auto e = ExpNonPositive(
          d, hn::Sub(LoadUpTo(d, p + at, left, -kInf), shift_lanes));
      hn::Store(e, d, to + at);
      return e;
    });
    shifts[chunk / kExpChunk] = shift;
  }
  return row;
}

// out = exp(x - max) * factor from what SumExpOfRow left; meanwhile fetches the
// row `next`.
template <class D, typename T>
HWY_INLINE void ScaleExpOfRow(D d, const float* HWY_RESTRICT scratch, float max,
                              double factor, const T* next, size_t n,
                              bool stream, T* out) {
  const float* const shifts = scratch + ExpChunks(n) * kExpChunk;
  for (size_t chunk = 0; chunk < n; chunk += kExpChunk) {
    const float* HWY_RESTRICT from = scratch + chunk;
    const double shift = shifts[chunk / kExpChunk];
    // (-inf) - (-inf) is NaN, as 0 / 0 would be in a row of only -inf.
    const auto scale =
        hn::Set(d, static_cast<float>(std::exp(shift - max) * factor));
    WriteRow(d, out + chunk, HWY_MIN(kExpChunk, n - chunk), stream,
             [&](size_t i, size_t) HWY_ATTR {
               PrefetchToL2(next + chunk + i);
               return hn::Mul(hn::LoadU(d, from + i), scale);
             });
  }
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_OPS_EXP_INL_H_
