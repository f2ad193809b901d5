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
#include "src/ops/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// exp(x) for x <= 0, relative error 1.2e-7; results below 2^-125.5 become 0.
template <class D>
HWY_INLINE hn::Vec<D> ExpNonPositive(D d, hn::Vec<D> x) {
  // x = k ln 2 + r with |r| <= ln(2) / 2; ln 2 in two parts, the first with
  // enough zero bits at its end that its product with k is exact.
  const auto k = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504088896341f)));
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
  const hn::RebindToSigned<D> di;
  const auto power =
      hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, k), hn::Set(di, 127)));
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

template <class D, typename T>
HWY_INLINE RowExpSum SumExpOfRow(D d, const T* x, size_t n) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  // A chunk stays in L1 between its maximum and its sum, so a row is read from
  // memory once.
  constexpr size_t kChunk = 2048;
  const size_t lanes = hn::Lanes(d);
  RowExpSum row = {-kInf, 0.0};
  for (size_t chunk = 0; chunk < n; chunk += kChunk) {
    const T* HWY_RESTRICT p = x + chunk;
    const size_t count = HWY_MIN(kChunk, n - chunk);
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
    const auto shift =
        hn::Set(d, max != max ? max : (row.max == -kInf ? 0.0f : row.max));
    const auto term = [&](size_t at, size_t left) HWY_ATTR {
      return ExpNonPositive(d,
                            hn::Sub(LoadUpTo(d, p + at, left, -kInf), shift));
    };
    row.sum += SumRow(d, count, term);
  }
  return row;
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_OPS_EXP_INL_H_
