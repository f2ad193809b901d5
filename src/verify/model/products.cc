// SPDX-License-Identifier: Apache-2.0
#include "src/verify/model/products.h"

#include <cmath>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/verify/model/products.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::verify {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows of B that are packed at once, and the depth of a run of sums: a strip of
// 256 rows of 128 bytes stays in L1.
constexpr int64_t kDepth = 256;

// kRows rows of C by two vectors of columns: 12 sums fit the 16 registers of
// AVX2 beside two of B and one of A.
template <int kRows, class T>
HWY_INLINE void Block(const Product<T>& x, int64_t i, int64_t j) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const size_t lanes = hn::Lanes(d);
  const T* a = x.a.data + i * x.a.row;
  T* c = x.c + i * x.c_row + j;
  const T* b = x.b.data + j;
  V s00 = hn::Zero(d), s01 = s00, s10 = s00, s11 = s00, s20 = s00, s21 = s00;
  V s30 = s00, s31 = s00, s40 = s00, s41 = s00, s50 = s00, s51 = s00;
  for (int64_t p = 0; p < x.depth; ++p, a += x.a.column, b += x.b.row) {
    const V b0 = hn::LoadU(d, b);
    const V b1 = hn::LoadU(d, b + lanes);
    const auto row = [&](int r, V& s0, V& s1) HWY_ATTR {
      const V v = hn::Set(d, a[r * x.a.row]);
      s0 = hn::MulAdd(v, b0, s0);
      s1 = hn::MulAdd(v, b1, s1);
    };
    row(0, s00, s01);
    if constexpr (kRows > 1) row(1, s10, s11);
    if constexpr (kRows > 2) row(2, s20, s21);
    if constexpr (kRows > 3) row(3, s30, s31);
    if constexpr (kRows > 4) row(4, s40, s41);
    if constexpr (kRows > 5) row(5, s50, s51);
  }
  const auto store = [&](int r, V s0, V s1) HWY_ATTR {
    T* to = c + r * x.c_row;
    hn::StoreU(hn::Add(hn::LoadU(d, to), s0), d, to);
    hn::StoreU(hn::Add(hn::LoadU(d, to + lanes), s1), d, to + lanes);
  };
  store(0, s00, s01);
  if constexpr (kRows > 1) store(1, s10, s11);
  if constexpr (kRows > 2) store(2, s20, s21);
  if constexpr (kRows > 3) store(3, s30, s31);
  if constexpr (kRows > 4) store(4, s40, s41);
  if constexpr (kRows > 5) store(5, s50, s51);
}

template <class T>
void AddStrip(const Product<T>& x, int64_t j) {
  int64_t i = 0;
  for (; i + 6 <= x.m; i += 6) Block<6>(x, i, j);
  for (; i + 2 <= x.m; i += 2) Block<2>(x, i, j);
  for (; i < x.m; ++i) Block<1>(x, i, j);
}

// The last columns, fewer than two vectors, by way of padded copies.
template <class T>
void AddTail(const Product<T>& x, int64_t j, int64_t step, T* packed, T* sums) {
  const int64_t left = x.n - j;
  for (int64_t p = 0; p < x.depth; ++p) {
    const T* from = x.b.data + p * x.b.row + j;
    T* to = packed + p * step;
    for (int64_t n = 0; n < step; ++n) to[n] = n < left ? from[n] : T(0);
  }
  // A few rows of C at a time.
  constexpr int64_t kRows = 6;
  for (int64_t i = 0; i < x.m; i += kRows) {
    Product<T> y = x;
    y.m = HWY_MIN(kRows, x.m - i);
    y.a.data += i * x.a.row;
    y.b = {packed, step};
    y.c = sums;
    y.c_row = step;
    for (int64_t n = 0; n < y.m * step; ++n) sums[n] = T(0);
    AddStrip(y, 0);
    for (int64_t r = 0; r < y.m; ++r) {
      T* to = x.c + (i + r) * x.c_row + j;
      for (int64_t n = 0; n < left; ++n) to[n] += sums[r * step + n];
    }
  }
}

template <class T>
void AddProductT(const Product<T>& product) {
  const auto step = static_cast<int64_t>(2 * hn::Lanes(hn::ScalableTag<T>()));
  std::vector<T> scratch(
      product.n % step == 0 ? 0 : static_cast<size_t>((kDepth + 6) * step));
  for (int64_t p = 0; p < product.depth; p += kDepth) {
    Product<T> x = product;
    x.depth = HWY_MIN(kDepth, product.depth - p);
    x.a.data += p * x.a.column;
    x.b.data += p * x.b.row;
    int64_t j = 0;
    for (; j + step <= x.n; j += step) AddStrip(x, j);
    if (j < x.n) {
      AddTail(x, j, step, scratch.data(), scratch.data() + kDepth * step);
    }
  }
}

template <class T>
double ExpRowT(const T* from, int64_t count, T shift, T* to) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto subtrahend = hn::Set(d, shift);
  // Hides -inf from the polynomial.
  const auto lowest = hn::Set(d, static_cast<T>(-1e5));
  double sum = 0.0;
  int64_t i = 0;
  // f32 sums of a lane stay short; they are added up in f64.
  constexpr int64_t kRun = 16;
  while (i + lanes <= count) {
    auto sums = hn::Zero(d);
    for (int64_t n = 0; n < kRun && i + lanes <= count; ++n, i += lanes) {
      const auto x = hn::Sub(hn::LoadU(d, from + i), subtrahend);
      const auto e =
          hn::IfThenElseZero(hn::Gt(x, lowest), hn::Exp(d, hn::Max(x, lowest)));
      sums = hn::Add(sums, e);
      hn::StoreU(e, d, to + i);
    }
    sum += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sums)));
  }
  for (; i < count; ++i) {
    to[i] = std::exp(from[i] - shift);
    sum += static_cast<double>(to[i]);
  }
  return sum;
}

void AddProductF32(const Product<float>& x) { AddProductT(x); }
void AddProductF64(const Product<double>& x) { AddProductT(x); }
double ExpRowF32(const float* from, int64_t n, float shift, float* to) {
  return ExpRowT(from, n, shift, to);
}
double ExpRowF64(const double* from, int64_t n, double shift, double* to) {
  return ExpRowT(from, n, shift, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::verify
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fa2::verify {

HWY_EXPORT(AddProductF32);
HWY_EXPORT(AddProductF64);
HWY_EXPORT(ExpRowF32);
HWY_EXPORT(ExpRowF64);

void AddProduct(const Product<float>& product) {
  HWY_DYNAMIC_DISPATCH(AddProductF32)(product);
}
void AddProduct(const Product<double>& product) {
  HWY_DYNAMIC_DISPATCH(AddProductF64)(product);
}
double ExpRow(const float* from, int64_t count, float shift, float* to) {
  return HWY_DYNAMIC_DISPATCH(ExpRowF32)(from, count, shift, to);
}
double ExpRow(const double* from, int64_t count, double shift, double* to) {
  return HWY_DYNAMIC_DISPATCH(ExpRowF64)(from, count, shift, to);
}

}  // namespace fa2::verify
#endif  // HWY_ONCE
