// SPDX-License-Identifier: Apache-2.0

// S of a block: scale, softcap, bias, ALiBi, masks, and dropout's mask.
#include <algorithm>
#include <cmath>
#include <limits>

#include "src/verify/model/head_block.h"
#include "src/verify/model/products.h"

namespace fa2::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Which keys each row sees, and the least range that holds them all.
template <class T>
void FindRanges(const HeadOperands<T>& h, const Faults& faults, Block<T>* b) {
  b->lo = h.sequence.nk;
  b->hi = 0;
  b->ranges.clear();
  for (int64_t r = 0; r < b->rows; ++r) {
    const KeyRange range =
        VisibleKeys(h.problem.options, faults, h.sequence, b->begin + r);
    b->ranges.push_back(range);
    if (range.begin < range.end) {
      b->lo = std::min(b->lo, range.begin);
      b->hi = std::max(b->hi, range.end);
    }
  }
  if (b->hi < b->lo) b->lo = b->hi = 0;
  b->width = b->hi - b->lo;
}

// To columns [begin, end) of a row of scores of query i.
template <class T>
void AddBias(const HeadOperands<T>& h, int64_t i, int64_t lo, int64_t begin,
             int64_t end, T* s) {
  const Array4<double>& bias = h.problem.bias;
  const Sizes& n = bias.sizes;
  const double* from = bias.row(n[0] == 1 ? 0 : h.sequence.index,
                                n[1] == 1 ? 0 : h.head, n[2] == 1 ? 0 : i);
  for (int64_t j = begin; j < end; ++j) {
    const double x = from[n[3] == 1 ? 0 : lo + j];
    s[j] = x == -kInfinity ? static_cast<T>(-kInfinity)
                           : s[j] + static_cast<T>(std::isfinite(x) ? x : 0);
  }
}

template <class T>
void ShapeRow(const HeadOperands<T>& h, const Faults& faults, int64_t r,
              T scale, Block<T>* b) {
  const int64_t i = b->begin + r;
  T* s = b->row(&b->scores, r);
  const KeyRange& range = b->ranges[static_cast<size_t>(r)];
  const bool empty = range.begin >= range.end;
  const int64_t begin = empty ? 0 : range.begin - b->lo;
  const int64_t end = empty ? 0 : range.end - b->lo;
  std::fill(s, s + begin, static_cast<T>(-kInfinity));
  std::fill(s + end, s + b->width, static_cast<T>(-kInfinity));
  for (int64_t j = begin; j < end; ++j) s[j] *= scale;
  const auto cap = static_cast<T>(h.problem.options.softcap);
  if (cap > T(0)) {
    T* slope = b->row(&b->cap_slope, r);
    for (int64_t j = begin; j < end; ++j) {
      const T tanh = std::tanh(s[j] / cap);
      s[j] = cap * tanh;
      slope[j] = 1 - tanh * tanh;
    }
  }
  if (h.problem.bias.given()) AddBias(h, i, b->lo, begin, end, s);
  if (h.problem.alibi_slopes.given()) {
    for (int64_t j = begin; j < end; ++j) {
      s[j] -= static_cast<T>(h.slope * AlibiDistance(h, faults, i, b->lo + j));
    }
  }
}

}  // namespace

template <class T>
double AlibiDistance(const HeadOperands<T>& h, const Faults& faults, int64_t i,
                     int64_t j) {
  const int64_t diagonal =
      faults.alibi_from_top_left ? i : i + h.sequence.nk - h.sequence.nq;
  return std::abs(static_cast<double>(diagonal - j));
}

template <class T>
void ComputeScores(const HeadOperands<T>& h, const Faults& faults,
                   Block<T>* b) {
  FindRanges(h, faults, b);
  const auto count = static_cast<size_t>(b->rows * b->width);
  b->scores.assign(count, T(0));
  b->cap_slope.assign(h.problem.options.softcap > 0.0 ? count : 0, T(1));
  AddProduct(Product<T>{b->rows,
                        b->width,
                        h.depth,
                        {h.q.data() + b->begin * h.depth, h.depth},
                        {h.k_transposed.data() + b->lo, h.sequence.nk},
                        b->scores.data(),
                        b->width});
  const T scale =
      static_cast<T>(std::pow(h.problem.scale, faults.score_scale_power));
  b->maxima.clear();
  for (int64_t r = 0; r < b->rows; ++r) {
    ShapeRow(h, faults, r, scale, b);
    const T* s = b->row(b->scores, r);
    T max = static_cast<T>(-kInfinity);
    for (int64_t j = 0; j < b->width; ++j) max = std::max(max, s[j]);
    b->maxima.push_back(static_cast<double>(max));
  }
}

template <class T>
void ReadKeep(const HeadOperands<T>& h, const Faults& faults, Block<T>* b) {
  b->keep.resize(static_cast<size_t>(b->rows * b->width));
  for (int64_t r = 0; r < b->rows; ++r) {
    KeepRow(h.problem, faults, h.sequence, h.head, b->begin + r, b->lo, b->hi,
            b->row(&b->keep, r));
  }
}

template double AlibiDistance(const HeadOperands<float>&, const Faults&,
                              int64_t, int64_t);
template double AlibiDistance(const HeadOperands<double>&, const Faults&,
                              int64_t, int64_t);
template void ComputeScores(const HeadOperands<float>&, const Faults&,
                            Block<float>*);
template void ComputeScores(const HeadOperands<double>&, const Faults&,
                            Block<double>*);
template void ReadKeep(const HeadOperands<float>&, const Faults&,
                       Block<float>*);
template void ReadKeep(const HeadOperands<double>&, const Faults&,
                       Block<double>*);

}  // namespace fa2::verify
