// SPDX-License-Identifier: Apache-2.0

// O and lse of a block of queries.
#include <algorithm>
#include <cmath>
#include <limits>

#include "src/verify/model/head_block.h"
#include "src/verify/model/products.h"

namespace fa2::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLn2 = 0.69314718055994530942;

// P of a row before it is divided by its sum, and its lse. The result is what
// the row of O is multiplied by.
template <class T>
double Normalise(const HeadOperands<T>& h, const Faults& faults, int64_t r,
                 Block<T>* b, HeadResults<T>* results) {
  const auto i = static_cast<size_t>(b->begin + r);
  const int64_t padded = b->ranges[static_cast<size_t>(r)].padded;
  double max = std::max(b->maxima[static_cast<size_t>(r)], h.sink);
  if (padded > 0) max = std::max(max, 0.0);
  T* p = b->row(&b->p, r);
  double& lse = results->lse[i];
  if (max == -kInfinity) {
    std::fill(p, p + b->width, T(0));
    lse = -kInfinity;
    results->stored_lse[i] = lse;
    return 0.0;
  }
  const double sum =
      ExpRow(b->row(b->scores, r), b->width, static_cast<T>(max), p) +
      std::exp(h.sink - max) + static_cast<double>(padded) * std::exp(-max);
  lse = max + std::log(sum);
  if (h.model.f32_lse) lse = static_cast<float>(lse);
  results->stored_lse[i] =
      LseInBackward(h, faults, lse, b->maxima[static_cast<size_t>(r)]);
  double normaliser = 1.0 / sum;
  if (h.dropout) {
    const T* keep = b->row(b->keep, r);
    for (int64_t j = 0; j < b->width; ++j) p[j] *= keep[j];
    if (!faults.keep_unscaled_out) normaliser *= h.keep_scale;
  }
  return normaliser;
}

}  // namespace

template <class T>
double LseInBackward(const HeadOperands<T>& h, const Faults& faults, double lse,
                     double max) {
  switch (faults.lse) {
    case LseUse::kRight:
      return lse;
    case LseUse::kTimesLn2:
      return lse * kLn2;
    case LseUse::kOverLn2:
      return lse / kLn2;
    case LseUse::kWithoutMax:
      return lse - max;
    case LseUse::kMax:
      return max;
    case LseUse::kWithoutSink:
      return max + std::log(std::max(
                       1e-300, std::exp(lse - max) - std::exp(h.sink - max)));
  }
  return lse;
}

template <class T>
void ForwardBlock(const HeadOperands<T>& h, const Faults& faults, Block<T>* b,
                  HeadResults<T>* results) {
  b->p.resize(static_cast<size_t>(b->rows * b->width));
  std::vector<T> factors;
  for (int64_t r = 0; r < b->rows; ++r) {
    const double factor = Normalise(h, faults, r, b, results);
    if (h.model.magnitudes && factor != 0.0) {
      AddOutMagnitude(h, *b, r, factor, results);
    }
    RoundRow(h.model.products, b->row(&b->p, r), b->width);
    factors.push_back(static_cast<T>(factor));
  }
  const int64_t columns = h.value_depth;
  T* out = results->out.data() + b->begin * columns;
  const int64_t rounded = h.model.faults.rounded_out_tile;
  const int64_t step = rounded > 0 ? rounded : std::max<int64_t>(1, b->width);
  for (int64_t j = 0; j < b->width; j += step) {
    AddProduct(Product<T>{b->rows,
                          columns,
                          std::min(step, b->width - j),
                          {b->p.data() + j, b->width},
                          {h.v.data() + (b->lo + j) * columns, columns},
                          out,
                          columns});
    if (rounded > 0) RoundRow(SumsIn16Bits(h.model), out, b->rows * columns);
  }
  for (const T factor : factors) {
    for (int64_t c = 0; c < columns; ++c, ++out) {
      *out = static_cast<T>(RoundStored(h.model.out, *out * factor));
    }
  }
}

template double LseInBackward(const HeadOperands<float>&, const Faults&, double,
                              double);
template double LseInBackward(const HeadOperands<double>&, const Faults&,
                              double, double);
template void ForwardBlock(const HeadOperands<float>&, const Faults&,
                           Block<float>*, HeadResults<float>*);
template void ForwardBlock(const HeadOperands<double>&, const Faults&,
                           Block<double>*, HeadResults<double>*);

}  // namespace fa2::verify
