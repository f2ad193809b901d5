// SPDX-License-Identifier: Apache-2.0

// Rows of exponentials for softmax and cross entropy.

#if defined(FA2_SRC_OPS_ROW_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_OPS_ROW_EXP_INL_H_
#undef FA2_SRC_OPS_ROW_EXP_INL_H_
#else
#define FA2_SRC_OPS_ROW_EXP_INL_H_
#endif

#include <cmath>
#include <cstddef>
#include <limits>

#include "hwy/highway.h"
#include "src/ops/load-inl.h"
#include "src/simd/math/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using simd::HWY_NAMESPACE::ExpNonPositive;

// Of a row: its maximum and sum(exp(x - max)). A NaN or +inf in the row makes
// the sum NaN; a row of only -inf has maximum -inf and sum 0.
template <typename A>
struct RowExpSum {
  A max = -std::numeric_limits<A>::infinity();
  double sum = 0.0;
};

// A row whose exponentials SumExpOfRow left in scratch, to be written as
// exp(x - max) * factor + offset.
template <typename T>
struct ScaledRow {
  T* out = nullptr;  // nullptr: nothing to write
  Computed<T> max = 0;
  double factor = 0.0;
  Computed<T> offset = 0;
  bool stream = false;  // by non-temporal stores
};

// exp(x - shift) times this is what is to be written. (-inf) - (-inf) is NaN,
// as 0 / 0 would be in a row of only -inf.
template <typename T>
HWY_INLINE Computed<T> ChunkScale(double shift, const ScaledRow<T>& row) {
  return static_cast<Computed<T>>(std::exp(shift - row.max) * row.factor);
}

template <class D, typename T>
HWY_INLINE hn::TFromD<D> MaxOf(D d, const T* HWY_RESTRICT x, size_t n) {
  constexpr auto kInf = std::numeric_limits<hn::TFromD<D>>::infinity();
  const size_t lanes = hn::Lanes(d);
  auto max0 = hn::Set(d, -kInf);
  auto max1 = max0;
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    max0 = hn::Max(max0, LoadVector(d, x + i));
    max1 = hn::Max(max1, LoadVector(d, x + i + lanes));
  }
  for (; i < n; i += lanes) {
    max0 = hn::Max(max0, LoadUpTo(d, x + i, n - i, -kInf));
  }
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(max0, max1)));
}

// The sum of exp(x - shift) over at most kExpChunk elements, which it leaves in
// `scratch`; writes what was there times `scale`, plus `offset`. Fetches as
// many elements from `ahead` meanwhile. The sum's bits do not depend on how it
// writes.
template <bool kWrite, class D, typename T>
HWY_INLINE double ExchangeExp(D d, const T* HWY_RESTRICT x, size_t n,
                              hn::TFromD<D> shift, const T* ahead,
                              hn::TFromD<D>* HWY_RESTRICT scratch,
                              hn::TFromD<D> scale, const ScaledRow<T>& last,
                              T* out) {
  using A = hn::TFromD<D>;
  const size_t lanes = hn::Lanes(d);
  const auto shift_lanes = hn::Set(d, shift);
  const auto scale_lanes = hn::Set(d, scale);
  const auto offset_lanes = hn::Set(d, last.offset);
  const bool stream = last.stream;
  // Vectors written are those of `out` that are aligned, the new exponentials
  // come to less than a vector behind them.
  const size_t head = kWrite && stream ? ElementsToAlignment(d, out, n) : 0;
  if (head != 0) {
    StoreUpTo(d, hn::MulAdd(hn::LoadU(d, scratch), scale_lanes, offset_lanes),
              out, head);
  }
  // GCC would call so large a function, with its vectors in memory.
  const auto exchange = [&](size_t i, size_t left) HWY_ATTR
      __attribute__((always_inline)) {
    PrefetchToL2(ahead + i);
    if constexpr (kWrite) {
      const size_t at = i + head;
      const auto y =
          hn::MulAdd(hn::LoadU(d, scratch + at), scale_lanes, offset_lanes);
      if (HWY_LIKELY(at + lanes <= n)) {
        if (stream) {
          StreamVector(d, y, out + at);
        } else {
          StoreVector(d, y, out + at);
        }
      } else if (at < n) {
        StoreUpTo(d, y, out + at, n - at);
      }
    }
    const auto e = ExpNonPositive(
        d,
        hn::Sub(LoadUpTo(d, x + i, left, -std::numeric_limits<A>::infinity()),
                shift_lanes));
    hn::StoreU(e, d, scratch + i);
    return e;
  };
  return SumRow(d, n, exchange);
}

// Leaves exp(x - shift) in `scratch`, shift being the maximum of the row up to
// the end of the chunk, and writes the row whose exponentials are there: the
// arithmetic of one row goes on while memory takes the other. Fetches as far
// ahead as a chunk, into the row `next` at the end.
template <class D, typename T>
HWY_INLINE RowExpSum<hn::TFromD<D>> SumExpOfRow(D d, const T* x, size_t n,
                                                const T* next,
                                                hn::TFromD<D>* scratch,
                                                const ScaledRow<T>& last) {
  using A = hn::TFromD<D>;
  constexpr A kInf = std::numeric_limits<A>::infinity();
  A* const shifts = scratch + ExpChunks(n) * kExpChunk;
  RowExpSum<A> row;
  for (size_t chunk = 0; chunk < n; chunk += kExpChunk) {
    const size_t count = HWY_MIN(kExpChunk, n - chunk);
    const A max = MaxOf(d, x + chunk, count);
    if (max > row.max) {
      row.sum *= std::exp(static_cast<double>(row.max) - max);
      row.max = max;
    }
    // Whether Max lets a NaN through differs between targets, but x - shift is
    // NaN wherever x is, and a shift of NaN makes all of them NaN. With only
    // -inf so far any finite shift gives exp = 0.
    const A shift = max != max ? max : row.max;
    const A finite = shift == -kInf ? A(0) : shift;
    A* const old_shift = shifts + chunk / kExpChunk;
    const T* const ahead =
        chunk + kExpChunk < n || next == x + n ? x + chunk + kExpChunk : next;
    if (last.out == nullptr) {
      row.sum += ExchangeExp<false>(d, x + chunk, count, finite, ahead,
                                    scratch + chunk, 0, last, last.out);
    } else {
      row.sum += ExchangeExp<true>(
          d, x + chunk, count, finite, ahead, scratch + chunk,
          ChunkScale(*old_shift, last), last, last.out + chunk);
    }
    *old_shift = shift;
  }
  return row;
}

// Writes the row whose exponentials are in `scratch`.
template <class D, typename T>
HWY_INLINE void WriteScaledRow(D d, const hn::TFromD<D>* HWY_RESTRICT scratch,
                               size_t n, const ScaledRow<T>& row) {
  if (row.out == nullptr) return;
  const hn::TFromD<D>* const shifts = scratch + ExpChunks(n) * kExpChunk;
  for (size_t chunk = 0; chunk < n; chunk += kExpChunk) {
    const hn::TFromD<D>* HWY_RESTRICT from = scratch + chunk;
    const auto scale = hn::Set(d, ChunkScale(shifts[chunk / kExpChunk], row));
    const auto offset = hn::Set(d, row.offset);
    WriteRow(d, row.out + chunk, HWY_MIN(kExpChunk, n - chunk), row.stream,
             [&](size_t i, size_t) HWY_ATTR {
               return hn::MulAdd(hn::LoadU(d, from + i), scale, offset);
             });
  }
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_OPS_ROW_EXP_INL_H_
