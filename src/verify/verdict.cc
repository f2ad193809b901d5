// SPDX-License-Identifier: Apache-2.0
#include "src/verify/verdict.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/verify/rounding.h"
#include "src/verify/visibility.h"

namespace fa2::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLn2 = 0.69314718055994530942;

// Deviations that the worst of many million elements may be off.
constexpr double kWorstElement = 8.0;

// Root mean square of a rounding error over its largest, times the mean of
// values' place between two powers of 2.
constexpr double kTypicalRounding = 0.4;

double Largest(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 65504.0;
    case DType::kF64:
      return std::numeric_limits<double>::max();
    default:
      return std::numeric_limits<float>::max();
  }
}

// The sequence that a row of a packed tensor belongs to, and whether any key is
// visible to each query: rows that see none have no lse.
std::vector<char> RowsWithoutKeys(const Problem& p) {
  std::vector<char> empty(static_cast<size_t>(p.batch * p.nq), 0);
  for (const Sequence& s : p.sequences) {
    for (int64_t i = 0; i < s.nq; ++i) {
      const KeyRange range = VisibleKeys(p.options, Faults(), s, i);
      empty[static_cast<size_t>(s.batch * p.nq + s.q_begin + i)] =
          range.begin >= range.end;
    }
  }
  return empty;
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
  return expected2 > 0.0 ? std::sqrt(error2 / expected2)
                         : (error2 > 0.0 ? kInfinity : 0.0);
}

std::vector<int64_t> FileIndex(const Problem& p, const std::string& name,
                               const Sizes& at) {
  const LogicalTensor& tensor = *p.Output(name);
  if (name != "lse") return tensor.FileIndex(at);
  for (const Sequence& s : p.sequences) {
    if (s.batch == at[0] && at[2] >= s.q_begin && at[2] < s.q_begin + s.nq) {
      return tensor.FileIndex(p.LseIndex(s, at[1], at[2] - s.q_begin));
    }
  }
  return tensor.FileIndex(at);
}

Array4<double> LoadCandidate(const Problem& p, const std::string& name) {
  const LogicalTensor& tensor = *p.Output(name);
  Array4<double> array(p.SizesOf(name));
  if (name == "lse") {
    for (const Sequence& s : p.sequences) {
      for (int64_t h = 0; h < p.heads; ++h) {
        for (int64_t i = 0; i < s.nq; ++i) {
          *array.row(s.batch, h, s.q_begin + i) =
              Get(tensor.view, p.LseIndex(s, h, i));
        }
      }
    }
    return array;
  }
  double* to = array.values.data();
  const Sizes& n = array.sizes;
  for (int64_t a = 0; a < n[0]; ++a) {
    for (int64_t b = 0; b < n[1]; ++b) {
      for (int64_t c = 0; c < n[2]; ++c) {
        for (int64_t d = 0; d < n[3]; ++d) {
          *to++ = Get(tensor.view, {a, b, c, d});
        }
      }
    }
  }
  return array;
}

TensorVerdict Judge(const Problem& p, const std::string& name,
                    const Array4<double>& candidate, const Expected& expected) {
  TensorVerdict v;
  v.name = name;
  v.sizes = candidate.sizes;
  const Sizes& n = candidate.sizes;
  const DType stored = p.Output(name)->view.dtype;
  const bool is_lse = name == "lse";
  const double base = is_lse && p.options.lse_base2 ? 1.0 / kLn2 : 1.0;
  const double unit = std::max(UnitRoundoff(p.products),
                               UnitRoundoff(p.Output(name)->view.dtype));
  // A sum of n terms one by one: its partial sums are rounded n times.
  const double longest = static_cast<double>(
      std::max({p.max_q * p.group(), p.max_k, p.head_dim, p.value_dim}));
  const double sum_unit = p.products == Products::kF64 ? 0x1p-53 : 0x1p-24;
  const double element_unit =
      unit + sum_unit * (4.0 + 0.5 * std::sqrt(longest));
  // Some kernels round P before and after they multiply it by 1 / (1 - p).
  const double multiple =
      TwinMultiple(p.products) + (p.options.dropout_p > 0.0 ? 0.5 : 0.0);
  const std::vector<char> empty_rows =
      is_lse ? RowsWithoutKeys(p) : std::vector<char>();
  v.tiles = (n[2] + kTileRows - 1) / kTileRows;
  v.map.resize(static_cast<size_t>(n[0] * n[1] * v.tiles));
  v.histogram.assign(24, 0);

  // How the columns' sizes differ: a few channels may be much larger.
  const auto columns = static_cast<size_t>(n[3]);
  std::vector<double> column2(columns, 0.0);
  double mean2 = 0.0;
  for (size_t i = 0; i < candidate.values.size(); ++i) {
    const double e = expected.answer->values[i];
    if (std::isfinite(e)) column2[i % columns] += e * e;
  }
  for (const double x : column2) mean2 += x / static_cast<double>(columns);
  std::vector<double> column_weight(columns, 1.0);
  for (size_t d = 0; d < columns; ++d) {
    if (mean2 > 0.0) {
      column_weight[d] = std::max(0.25, std::sqrt(column2[d] / mean2));
    }
  }

  // Terms far below the tensor's own size may be flushed to zero.
  const double negligible =
      0x1p-10 * unit *
      std::sqrt(mean2 * static_cast<double>(columns) /
                static_cast<double>(candidate.values.size()));

  SliceError total;
  double row_twin4 = 0.0, got_expected = 0.0, got2 = 0.0;
  double stored2 = 0.0;
  double worst_excess = -1.0;
  Sizes worst = {0, 0, 0, 0};
  bool element_fails = false;
  for (int64_t a = 0; a < n[0]; ++a) {
    for (int64_t b = 0; b < n[1]; ++b) {
      for (int64_t c = 0; c < n[2]; ++c) {
        SliceError& slice = v.map[static_cast<size_t>((a * n[1] + b) * v.tiles +
                                                      c / kTileRows)];
        ++slice.rows;
        double row_twin2 = 0.0, row_error2 = 0.0, row_expected2 = 0.0;
        double row_stored2 = 0.0;
        const double row_size =
            expected.size != nullptr ? *expected.size->row(a, b, c) : 0.0;
        for (int64_t d = 0; d < n[3]; ++d) {
          const auto at = static_cast<size_t>(candidate.offset(a, b, c) + d);
          const double got = candidate.values[at];
          const double e = expected.answer->values[at] * base;
          if (is_lse && (empty_rows[static_cast<size_t>(a * n[2] + c)] != 0 ||
                         e == -kInfinity)) {
            // Libraries differ in what such a row's lse is.
            if (got == 0.0 || std::isinf(got)) continue;
          }
          const bool overflows =
              std::abs(RoundStored(stored, e)) >= Largest(stored) &&
              std::abs(e) > Largest(stored);
          if (!std::isfinite(e) && !std::isfinite(got)) continue;
          if (overflows && std::isinf(got) && (got > 0) == (e > 0)) continue;
          if (std::isfinite(e) != std::isfinite(got)) {
            ++v.bad;
            ++slice.bad;
            if (worst_excess != kInfinity) {
              worst_excess = kInfinity;
              worst = {a, b, c, d};
            }
            continue;
          }
          const double error = got - e;
          double twin = expected.twin_f32 != nullptr
                            ? expected.twin_f32->values[at]
                            : expected.twin_f64->values[at];
          twin = RoundStored(stored, twin * base);
          const double twin_error = std::isfinite(twin) ? twin - e : 0.0;
          const double half_ulp = HalfUlp(stored, e);
          row_error2 += error * error;
          row_expected2 += e * e;
          row_twin2 += twin_error * twin_error;
          row_stored2 += half_ulp * half_ulp;
          got_expected += got * e;
          got2 += got * got;
          double allowed = half_ulp + negligible;
          if (is_lse) {
            allowed += kWorstElement * std::abs(twin_error) +
                       kWorstElement * (sum_unit * (8.0 + std::abs(e)));
          } else if (row_size > 0.0 || expected.size != nullptr) {
            allowed += kWorstElement * element_unit * row_size *
                       column_weight[static_cast<size_t>(d)];
            allowed +=
                kWorstElement * std::abs(twin_error) + unit * std::abs(e);
          } else {
            allowed +=
                4.0 * unit * std::abs(e) + kWorstElement * std::abs(twin_error);
          }
          const double excess = std::abs(error) / std::max(allowed, 1e-300);
          if (error != 0.0) {
            const int bin = std::clamp(std::ilogb(excess) + 16, 0, 23);
            ++v.histogram[static_cast<size_t>(bin)];
          }
          if (excess > worst_excess) {
            worst_excess = excess;
            worst = {a, b, c, d};
          }
          if (expected.size != nullptr || is_lse) {
            element_fails |= excess > 1.0 && !is_lse;
          }
        }
        slice.error2 += row_error2;
        slice.expected2 += row_expected2;
        slice.twin2 += row_twin2;
        slice.size2 += row_size * row_size * static_cast<double>(n[3]);
        row_twin4 += row_twin2 * row_twin2;
        stored2 += row_stored2;
      }
    }
  }
  for (const SliceError& slice : v.map) {
    total.error2 += slice.error2;
    total.expected2 += slice.expected2;
    total.twin2 += slice.twin2;
    total.size2 += slice.size2;
    total.rows += slice.rows;
  }

  // What a slice of so many rows may err. A mean over few errors spreads; where
  // it is of very few, the twin's may have been lucky, and what rounding each
  // term once would leave stands in.
  const double count = static_cast<double>(candidate.values.size());
  const auto allowed_of = [&](const SliceError& slice, double rows_that_count,
                              double slack, double share) {
    const double size = std::sqrt(slice.size2);
    const double rounding = kTypicalRounding * unit * size;
    const double lucky = std::min(1.0, share / rows_that_count);
    const double twin = std::max(std::sqrt(slice.twin2), lucky * rounding);
    double allowed =
        multiple * (1.0 + slack / std::sqrt(rows_that_count)) * twin;
    allowed += sum_unit * size;
    if (is_lse) {
      allowed += 4.0 * sum_unit *
                 (std::sqrt(slice.expected2) +
                  std::sqrt(static_cast<double>(slice.rows)));
    }
    return allowed;
  };
  const double rows_that_count =
      row_twin4 > 0.0 ? std::max(1.0, total.twin2 * total.twin2 / row_twin4)
                      : static_cast<double>(std::max<int64_t>(1, total.rows));
  // What storing may cost, once: where it is all of the error, few elements
  // may all be at their worst.
  const double stored_l2 = std::sqrt(stored2);
  const double error = std::sqrt(total.error2);
  const double size = std::sqrt(total.expected2);
  // fa2 itself gives these two in f32.
  const double answer_rounding =
      name == "dsinks" || name == "dalibi_slopes" ? 0x1p-23 * size : 0.0;
  const double allowed = allowed_of(total, rows_that_count, 2.0, 8.0) +
                         stored_l2 * std::min(1.0, 8.0 / std::sqrt(count)) +
                         answer_rounding;
  v.bound = size > 0.0 ? allowed / size : 0.0;
  v.twin_relative_l2 = size > 0.0 ? std::sqrt(total.twin2) / size : 0.0;
  // A value that is 0 but for rounding has no relative error.
  const double rounded_zero =
      4.0 * sum_unit * std::sqrt(total.size2) + stored_l2 * 0x1p-20;
  if (size > rounded_zero || (size > 0.0 && total.size2 == 0.0)) {
    v.relative_l2 = error / size;
  }
  v.cosine = size > 0.0 && got2 > 0.0 ? got_expected / (size * std::sqrt(got2))
                                      : (error == 0.0 ? 1.0 : 0.0);
  v.worst.index = FileIndex(p, name, worst);
  v.worst.got = candidate.row(worst[0], worst[1], worst[2])[worst[3]];
  v.worst.expected =
      expected.answer->row(worst[0], worst[1], worst[2])[worst[3]] * base;

  if (v.bad > 0) v.pass = false;
  if (!(error <= allowed)) v.pass = false;
  if (element_fails) v.pass = false;
  for (const SliceError& slice : v.map) {
    const double slice_allowed =
        2.0 * allowed_of(slice,
                         static_cast<double>(std::max<int64_t>(1, slice.rows)),
                         4.0, 1e9) +
        std::sqrt(stored2 / count * static_cast<double>(slice.rows * n[3])) *
            (count <= 4096 ? 1.0 : 0.1) +
        answer_rounding;
    if (std::sqrt(slice.error2) > slice_allowed) v.pass = false;
  }
  return v;
}

}  // namespace fa2::verify
