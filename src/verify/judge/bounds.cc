// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fa2::verify {
namespace {

// Deviations that the worst of many million elements may be off.
constexpr double kWorstElement = 8.0;

// Root mean square of a rounding's relative error over the largest: 1 / sqrt(3)
// for values just over a power of 2, and over all values (log-uniform) 0.425.
constexpr double kTypicalRounding = 0.425;
constexpr double kLeastMantissaRounding = 0.578;

constexpr double kTileSlack = 1.0;

// Kernels whose products have 16 bits approximate exp by polynomials that are
// no more accurate than they need: PyTorch's on CPUs by 2^-16, by cubics on
// GPUs by 2^-13.
constexpr double kExpError = 0x1p-13;

// How often an honest tensor may be rejected, were roundings normal variables.
constexpr double kRejected = 1e-6;

// x, where exp(-x) of so many is kRejected in all.
double Exponent(int64_t judged) {
  return std::log(static_cast<double>(std::max<int64_t>(1, judged)) /
                  kRejected);
}

}  // namespace

double TwinMultiple(Products products) {
  switch (products) {
    case Products::kBF16:
    case Products::kF16:
      return 1.5;
    case Products::kTF32:
      return 3.0;
    case Products::kF32:
      return 6.0;
    case Products::kF64:
      return 10.0;
  }
  return 1.0;
}

double SliceError::relative() const {
  if (expected2 > 0.0) return std::sqrt(error2 / expected2);
  return error2 > 0.0 ? std::numeric_limits<double>::infinity() : 0.0;
}

Bounds::Bounds(const Problem& p, const std::string& name, DType stored,
               double rms, int64_t elements)
    : stored_(stored), is_lse_(name == "lse") {
  unit_ = std::max(UnitRoundoff(p.products), UnitRoundoff(stored));
  sum_unit_ = p.products == Products::kF64 ? 0x1p-53 : 0x1p-24;
  // A sum of n terms one by one: its partial sums are rounded n times.
  const auto longest = static_cast<double>(
      std::max({p.max_q * p.group(), p.max_k, p.head_dim, p.value_dim}));
  element_unit_ = unit_ + sum_unit_ * (4.0 + 0.5 * std::sqrt(longest));
  // Some kernels round P before and after they multiply it by 1 / (1 - p).
  multiple_ =
      TwinMultiple(p.products) + (p.options.dropout_p > 0.0 ? 0.5 : 0.0);
  // Terms far below the tensor's own size may be flushed to zero.
  negligible_ = 0x1p-10 * unit_ * rms;
  const bool half =
      p.products == Products::kBF16 || p.products == Products::kF16;
  exp_error_ = half ? kExpError : 0.0;
  element_deviations_ = std::sqrt(2.0 * Exponent(elements));
}

double Bounds::OfElement(const ElementSize& x) const {
  const double expected = std::abs(x.expected);
  double allowed = HalfUlp(stored_, x.expected) + negligible_ +
                   kWorstElement * std::abs(x.twin_error);
  if (is_lse_) {
    allowed += kWorstElement * sum_unit_ * (8.0 + expected) + exp_error_;
  } else if (x.size >= 0.0) {
    allowed +=
        kWorstElement * element_unit_ * x.size + unit_ * expected +
        element_deviations_ * kLeastMantissaRounding * unit_ * x.row_largest;
  } else {
    allowed += 4.0 * unit_ * expected;
  }
  return allowed;
}

// The error is a sum of roundings, each a random number times its effect on all
// elements. Its mean square V is the sum of the eigenvalues l of its
// covariance, and |e|^2 is over V + 2 sqrt(x sum l^2) + 2 x max l with a
// probability under exp(-x) (Laurent and Massart 2000, lemma 1). Rows err apart
// but for what they share. Many roundings of one size leave V alone; where one
// query attends to one key, a single one is all there is, and |e| may be
// several times sqrt(V).
double Bounds::Of(const SliceError& slice, double rows_that_count, double slack,
                  int64_t judged) const {
  double allowed = multiple_ * std::sqrt(slice.twin2);
  if (slice.size2 > 0.0) {
    // Of sums in f32 and f64, and of TF32 that is cut off, as of the twin.
    const double unit = unit_ * multiple_ / TwinMultiple(Products::kBF16);
    const double x = Exponent(judged);
    const double spread2 =
        2.0 * std::sqrt(x * (slice.rows4 + slice.shared4)) +
        2.0 * x * (slice.row_largest2 + std::sqrt(slice.shared4));
    const double mean =
        std::max(allowed, kTypicalRounding * unit * std::sqrt(slice.size2));
    allowed =
        std::hypot(mean, kLeastMantissaRounding * unit * std::sqrt(spread2)) +
        sum_unit_ * std::sqrt(slice.size2);
  } else {
    // Nothing is known but the twin's error, which may have been lucky.
    allowed *= 1.0 + slack / std::sqrt(rows_that_count);
  }
  if (is_lse_) {
    allowed += 4.0 * sum_unit_ *
                   (std::sqrt(slice.expected2) +
                    std::sqrt(static_cast<double>(slice.rows))) +
               exp_error_ * std::sqrt(static_cast<double>(slice.rows));
  }
  return allowed;
}

double Bounds::OfTensor(const SliceError& total, double rows_that_count) const {
  return Of(total, rows_that_count, 2.0, 1);
}

double Bounds::OfTile(const SliceError& tile, int64_t tiles) const {
  const auto rows = static_cast<double>(std::max<int64_t>(1, tile.rows));
  const double allowed = Of(tile, rows, 4.0, tiles);
  return tile.size2 > 0.0 ? kTileSlack * allowed : 2.0 * allowed;
}

double Bounds::OfZero(const SliceError& total) const {
  return 4.0 * sum_unit_ * std::sqrt(total.size2);
}

}  // namespace fa2::verify
