// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fa2::verify {
namespace {

// Deviations that the worst of many million elements may be off.
constexpr double kWorstElement = 8.0;

// Root mean square of a rounding error over its largest, times the mean of
// values' place between two powers of 2.
constexpr double kTypicalRounding = 0.4;

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
               double rms)
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
}

double Bounds::OfElement(const ElementSize& x) const {
  const double expected = std::abs(x.expected);
  double allowed = HalfUlp(stored_, x.expected) + negligible_ +
                   kWorstElement * std::abs(x.twin_error);
  if (is_lse_) {
    allowed += kWorstElement * sum_unit_ * (8.0 + expected);
  } else if (x.size >= 0.0) {
    allowed += kWorstElement * element_unit_ * x.size + unit_ * expected;
  } else {
    allowed += 4.0 * unit_ * expected;
  }
  return allowed;
}

// A mean over few errors spreads, by `slack` deviations; where it is of very
// few, `share` or less, the twin's may have been lucky, and what rounding each
// term once would leave stands in.
double Bounds::Of(const SliceError& slice, double rows_that_count, double slack,
                  double share) const {
  const double size = std::sqrt(slice.size2);
  const double rounding = kTypicalRounding * unit_ * size;
  const double lucky = std::min(1.0, share / rows_that_count);
  const double twin = std::max(std::sqrt(slice.twin2), lucky * rounding);
  double allowed =
      multiple_ * (1.0 + slack / std::sqrt(rows_that_count)) * twin;
  allowed += sum_unit_ * size;
  if (is_lse_) {
    allowed += 4.0 * sum_unit_ *
               (std::sqrt(slice.expected2) +
                std::sqrt(static_cast<double>(slice.rows)));
  }
  return allowed;
}

double Bounds::OfTensor(const SliceError& total, double rows_that_count) const {
  return Of(total, rows_that_count, 2.0, 8.0);
}

double Bounds::OfTile(const SliceError& tile) const {
  const auto rows = static_cast<double>(std::max<int64_t>(1, tile.rows));
  return 2.0 * Of(tile, rows, 4.0, std::numeric_limits<double>::max());
}

double Bounds::OfZero(const SliceError& total) const {
  return 4.0 * sum_unit_ * std::sqrt(total.size2);
}

}  // namespace fa2::verify
