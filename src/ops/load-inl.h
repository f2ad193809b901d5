// SPDX-License-Identifier: Apache-2.0

// Vectors of f32 or f64 from and to rows of any float type, the last vector of
// a row included.

#if defined(FA2_SRC_OPS_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_OPS_LOAD_INL_H_
#undef FA2_SRC_OPS_LOAD_INL_H_
#else
#define FA2_SRC_OPS_LOAD_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "src/ops/elements.h"
#include "src/simd/math/store-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using simd::HWY_NAMESPACE::LoadWide;
using simd::HWY_NAMESPACE::NarrowToBf16;
using simd::HWY_NAMESPACE::StoredBF16;
using simd::HWY_NAMESPACE::StoredF32;
using simd::HWY_NAMESPACE::StoreF16;
using simd::HWY_NAMESPACE::StoreNarrow;

template <class D>
HWY_INLINE hn::Vec<D> LoadVector(D d, const float* p) {
  return LoadWide(d, StoredF32(), p);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadVector(D d, const double* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadVector(D d, const Bf16* p) {
  return LoadWide(d, StoredBF16(), p);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadVector(D d, const F16* p) {
  return simd::HWY_NAMESPACE::LoadF16(d, &p->bits);
}

template <class D>
HWY_INLINE void StoreVector(D d, hn::Vec<D> v, float* p) {
  StoreNarrow(d, StoredF32(), v, p);
}
template <class D>
HWY_INLINE void StoreVector(D d, hn::Vec<D> v, double* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void StoreVector(D d, hn::Vec<D> v, F16* p) {
  StoreF16(d, v, &p->bits);
}
template <class D>
HWY_INLINE void StoreVector(D d, hn::Vec<D> v, Bf16* p) {
  hn::StoreU(NarrowToBf16(d, v), hn::Rebind<uint16_t, D>(), p);
}

// The same by non-temporal stores, but where the conversion has no store of its
// own; p is aligned to the vector stored.
template <class D, typename T>
HWY_INLINE void StreamVector(D d, hn::Vec<D> v, T* p) {
  if constexpr (std::is_same_v<T, hn::TFromD<D>>) {
    hn::Stream(v, d, p);
  } else {
    StoreVector(d, v, p);
  }
}
template <class D>
HWY_INLINE void StreamVector(D d, hn::Vec<D> v, Bf16* p) {
  const hn::Rebind<uint16_t, D> d16;
  // Stream writes whole 16-byte blocks.
  if constexpr (hn::MaxLanes(d16) * sizeof(Bf16) >= 16) {
    hn::Stream(NarrowToBf16(d, v), d16, p);
  } else {
    hn::StoreU(NarrowToBf16(d, v), d16, p);
  }
}

// Fetches a line that a later row will need: into L2, where it does not push
// out what this row still works on in L1.
template <typename T>
HWY_INLINE void PrefetchToL2(const T* p) {
  __builtin_prefetch(p, /*rw=*/0, /*locality=*/2);
}

// Up to one vector, `left` elements being left in the row; lanes past them are
// `fill`, and memory past them is not touched.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadUpTo(D d, const T* p, size_t left,
                               hn::TFromD<D> fill = 0) {
  if (HWY_LIKELY(left >= hn::Lanes(d))) return LoadVector(d, p);
  HWY_ALIGN hn::TFromD<D> lanes[hn::MaxLanes(D())];
  for (size_t i = 0; i < left; ++i) lanes[i] = Widen(p[i]);
  for (size_t i = left; i < hn::Lanes(d); ++i) lanes[i] = fill;
  return hn::Load(d, lanes);
}

template <class D, typename T>
HWY_INLINE void StoreUpTo(D d, hn::Vec<D> v, T* p, size_t left) {
  if (HWY_LIKELY(left >= hn::Lanes(d))) return StoreVector(d, v, p);
  HWY_ALIGN hn::TFromD<D> lanes[hn::MaxLanes(D())];
  hn::Store(v, d, lanes);
  for (size_t i = 0; i < left; ++i) Narrow(lanes[i], p + i);
}

// Elements before the first that StreamVector may store at, at most n.
template <class D, typename T>
HWY_INLINE size_t ElementsToAlignment(D d, const T* p, size_t n) {
  const size_t bytes = hn::Lanes(d) * sizeof(T);
  const size_t past = reinterpret_cast<uintptr_t>(p) % bytes;
  return past == 0 ? 0 : HWY_MIN(n, (bytes - past) / sizeof(T));
}

// Stores f(i, count), the vector of elements [i, i + count) of a row, for the
// whole row.
template <class D, typename T, class Function>
HWY_INLINE void WriteRow(D d, T* out, size_t n, bool stream,
                         const Function& f) {
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  if (stream) {
    i = ElementsToAlignment(d, out, n);
    if (i != 0) StoreUpTo(d, f(size_t{0}, i), out, i);
    for (; i + lanes <= n; i += lanes) {
      StreamVector(d, f(i, lanes), out + i);
    }
  } else {
    for (; i + lanes <= n; i += lanes) StoreVector(d, f(i, lanes), out + i);
  }
  if (i < n) StoreUpTo(d, f(i, n - i), out + i, n - i);
}

// Sum of f(i, count) over a row of n elements; lanes past count must be 0. f32
// sums over chunks of 1,024 elements (at most 256 terms a lane), f64 between
// them; f64 lanes sum in f64.
template <class D, class Function>
HWY_INLINE double SumRow(D d, size_t n, const Function& f) {
  constexpr size_t kChunk = 1024;
  const size_t lanes = hn::Lanes(d);
  double sum = 0.0;
  for (size_t chunk = 0; chunk < n; chunk += kChunk) {
    const size_t end = HWY_MIN(n, chunk + kChunk);
    // Four sums hide the latency of an add (4 cycles, two adds a cycle need
    // more, but then loads are the limit).
    auto sum0 = hn::Zero(d);
    auto sum1 = hn::Zero(d);
    auto sum2 = hn::Zero(d);
    auto sum3 = hn::Zero(d);
    size_t i = chunk;
    for (; i + 4 * lanes <= end; i += 4 * lanes) {
      sum0 = hn::Add(sum0, f(i, lanes));
      sum1 = hn::Add(sum1, f(i + lanes, lanes));
      sum2 = hn::Add(sum2, f(i + 2 * lanes, lanes));
      sum3 = hn::Add(sum3, f(i + 3 * lanes, lanes));
    }
    for (; i < end; i += lanes) {
      sum0 = hn::Add(sum0, f(i, HWY_MIN(lanes, end - i)));
    }
    sum0 = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
    sum += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum0)));
  }
  return sum;
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_OPS_LOAD_INL_H_
