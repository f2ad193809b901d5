// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/verdict.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "src/verify/model/rounding.h"
#include "src/verify/model/visibility.h"

namespace fa2::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLn2 = 0.69314718055994530942;

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

// The largest root mean square of a column over that of all: a few channels may
// be much larger than others.
std::vector<double> ColumnWeights(const std::vector<double>& column2,
                                  double mean2) {
  std::vector<double> weights;
  weights.reserve(column2.size());
  for (const double x : column2) {
    weights.push_back(mean2 > 0.0 ? std::max(0.25, std::sqrt(x / mean2)) : 1.0);
  }
  return weights;
}

class Judgement {
 public:
  Judgement(const Problem& problem, const std::string& name,
            const Array4<double>& candidate, const Expected& expected)
      : p_(problem),
        x_(candidate),
        e_(expected),
        stored_(problem.Output(name)->view.dtype),
        is_lse_(name == "lse"),
        base_(is_lse_ && problem.options.lse_base2 ? 1.0 / kLn2 : 1.0),
        count_(static_cast<double>(candidate.values.size())) {
    v_.name = name;
    v_.sizes = x_.sizes;
    v_.tiles = (x_.sizes[2] + kTileRows - 1) / kTileRows;
    v_.map.resize(static_cast<size_t>(x_.sizes[0] * x_.sizes[1] * v_.tiles));
    v_.histogram.assign(24, 0);
    if (is_lse_) empty_rows_ = RowsWithoutKeys(problem);
  }

  TensorVerdict Run() {
    const Bounds bounds = MeasureAnswer();
    const Sizes& n = x_.sizes;
    for (int64_t a = 0; a < n[0]; ++a) {
      for (int64_t b = 0; b < n[1]; ++b) {
        for (int64_t c = 0; c < n[2]; ++c) JudgeRow(bounds, a, b, c);
      }
    }
    Decide(bounds);
    return std::move(v_);
  }

 private:
  Bounds MeasureAnswer() {
    const auto columns = static_cast<size_t>(x_.sizes[3]);
    std::vector<double> column2(columns, 0.0);
    double total2 = 0.0;
    for (size_t i = 0; i < x_.values.size(); ++i) {
      const double e = e_.answer->values[i];
      if (!std::isfinite(e)) continue;
      column2[i % columns] += e * e;
      total2 += e * e;
    }
    column_weights_ =
        ColumnWeights(column2, total2 / static_cast<double>(columns));
    double sum2 = 0.0, sum4 = 0.0;
    for (const double w : column_weights_) {
      sum2 += w * w;
      sum4 += w * w * w * w;
    }
    column_fourths_ = sum4 / (sum2 * sum2);
    return {p_, v_.name, stored_, std::sqrt(total2 / count_),
            static_cast<int64_t>(x_.values.size())};
  }

  double TwinError(size_t at, double e) const {
    const double twin = e_.twin_f32 != nullptr ? e_.twin_f32->values[at]
                                               : e_.twin_f64->values[at];
    const double error = RoundStored(stored_, twin * base_) - e;
    return std::isfinite(error) ? error : 0.0;
  }

  // Whether what is not finite, or a row that has no lse, is as it may be; then
  // the element is left out.
  bool Excused(double got, double e, bool no_key) const {
    // Libraries differ in what the lse of a row that sees no key is.
    if (is_lse_ && (no_key || e == -kInfinity)) {
      return got == 0.0 || std::isinf(got);
    }
    if (!std::isfinite(e) && !std::isfinite(got)) return true;
    return std::abs(e) > Largest(stored_) && std::isinf(got) &&
           (got > 0) == (e > 0);
  }

  void KeepWorst(double excess, const Sizes& at) {
    if (!(excess > worst_excess_)) return;
    worst_excess_ = excess;
    worst_ = at;
  }

  void JudgeRow(const Bounds& bounds, int64_t a, int64_t b, int64_t c) {
    SliceError& slice = v_.map[static_cast<size_t>(
        (a * x_.sizes[1] + b) * v_.tiles + c / kTileRows)];
    ++slice.rows;
    const bool no_key =
        is_lse_ && empty_rows_[static_cast<size_t>(a * x_.sizes[2] + c)] != 0;
    const RowError row_error =
        e_.error != nullptr ? *e_.error->row(a, b, c) : RowError();
    const double row_size =
        e_.error != nullptr ? std::sqrt(row_error.squares) : -1.0;
    const auto columns = static_cast<double>(x_.sizes[3]);
    // All of it may be in one column.
    const double row_largest =
        std::pow(row_error.fourths * columns * columns, 0.25);
    double row_twin2 = 0.0;
    for (int64_t d = 0; d < x_.sizes[3]; ++d) {
      const auto at = static_cast<size_t>(x_.offset(a, b, c) + d);
      const double got = x_.values[at];
      const double e = e_.answer->values[at] * base_;
      if (Excused(got, e, no_key)) continue;
      if (std::isfinite(e) != std::isfinite(got) ||
          (std::isnan(got) && !std::isnan(e))) {
        ++v_.bad;
        ++slice.bad;
        KeepWorst(kInfinity, {a, b, c, d});
        continue;
      }
      const double error = got - e;
      const double twin_error = TwinError(at, e);
      slice.error2 += error * error;
      slice.expected2 += e * e;
      row_twin2 += twin_error * twin_error;
      const double half_ulp = HalfUlp(stored_, e);
      stored2_ += half_ulp * half_ulp;
      got_expected_ += got * e;
      got2_ += got * got;
      const double size =
          row_size < 0.0 ? -1.0
                         : row_size * column_weights_[static_cast<size_t>(d)];
      const double excess =
          std::abs(error) /
          std::max(bounds.OfElement({e, twin_error, size, row_largest}),
                   1e-300);
      if (error != 0.0) {
        const int bin = std::clamp(std::ilogb(excess) + 16, 0, 23);
        ++v_.histogram[static_cast<size_t>(bin)];
      }
      KeepWorst(excess, {a, b, c, d});
      element_fails_ |= excess > 1.0 && e_.error != nullptr && !is_lse_;
    }
    slice.twin2 += row_twin2;
    slice.size2 += row_error.squares * columns;
    const double row4 =
        (row_error.fourths +
         column_fourths_ * row_error.squares * row_error.squares) *
        columns * columns;
    slice.row_largest2 = std::max(slice.row_largest2, std::sqrt(row4));
    slice.rows4 += row4;
    slice.shared4 += row_error.shared * columns * columns;
    row_twin4_ += row_twin2 * row_twin2;
  }

  void Decide(const Bounds& bounds) {
    SliceError total;
    for (const SliceError& slice : v_.map) {
      total.error2 += slice.error2;
      total.expected2 += slice.expected2;
      total.twin2 += slice.twin2;
      total.size2 += slice.size2;
      total.row_largest2 = std::max(total.row_largest2, slice.row_largest2);
      total.rows4 += slice.rows4;
      total.shared4 += slice.shared4;
      total.rows += slice.rows;
    }
    // Rows as many as would err like the twin's, were they all alike.
    const double rows_that_count =
        row_twin4_ > 0.0
            ? std::max(1.0, total.twin2 * total.twin2 / row_twin4_)
            : static_cast<double>(std::max<int64_t>(1, total.rows));
    // What storing may cost, once: where it is all of the error, few elements
    // may all be at their worst.
    const double stored_l2 = std::sqrt(stored2_);
    const double error = std::sqrt(total.error2);
    const double size = std::sqrt(total.expected2);
    // fa2 itself gives these two in f32.
    const double answer_rounding =
        v_.name == "dsinks" || v_.name == "dalibi_slopes" ? 0x1p-23 * size
                                                          : 0.0;
    const double allowed = bounds.OfTensor(total, rows_that_count) +
                           stored_l2 * std::min(1.0, 8.0 / std::sqrt(count_)) +
                           answer_rounding;
    v_.bound = size > 0.0 ? allowed / size : 0.0;
    v_.twin_relative_l2 = size > 0.0 ? std::sqrt(total.twin2) / size : 0.0;
    // A value that is 0 but for rounding has no relative error.
    const double rounded_zero = bounds.OfZero(total) + stored_l2 * 0x1p-20;
    if (size > rounded_zero || (size > 0.0 && total.size2 == 0.0)) {
      v_.relative_l2 = error / size;
    }
    v_.cosine = size > 0.0 && got2_ > 0.0
                    ? got_expected_ / (size * std::sqrt(got2_))
                    : (error == 0.0 ? 1.0 : 0.0);
    v_.worst.index = FileIndex(p_, v_.name, worst_);
    v_.worst.got = x_.row(worst_[0], worst_[1], worst_[2])[worst_[3]];
    v_.worst.expected =
        e_.answer->row(worst_[0], worst_[1], worst_[2])[worst_[3]] * base_;

    v_.element_ratio = worst_excess_;
    v_.pass = v_.bad == 0 && error <= allowed && !element_fails_;
    const bool whole = v_.pass;
    size_t worst_tile = 0;
    int64_t failed_tiles = 0;
    for (size_t n = 0; n < v_.map.size(); ++n) {
      SliceError& slice = v_.map[n];
      const double elements = static_cast<double>(slice.rows * x_.sizes[3]);
      slice.allowed =
          bounds.OfTile(slice, static_cast<int64_t>(v_.map.size())) +
          std::sqrt(stored2_ / count_ * elements) *
              (count_ <= 4096 ? 1.0 : 0.1) +
          answer_rounding;
      const double ratio =
          std::sqrt(slice.error2) / std::max(slice.allowed, 1e-300);
      failed_tiles += ratio > 1.0;
      if (ratio > v_.tile_ratio) worst_tile = n;
      v_.tile_ratio = std::max(v_.tile_ratio, ratio);
    }
    v_.pass &= failed_tiles == 0;
    if (v_.bad > 0 || error > allowed) return;
    if (!whole) SayElement();
    if (failed_tiles > 0) SayTile(worst_tile, failed_tiles);
  }

  // Why a tensor fails whose error as a whole is small.
  void SayElement() {
    v_.findings.push_back(
        "the whole is within its bound, single elements are "
        "not: the worst errs " +
        Times(v_.element_ratio) + " times what an element may");
  }
  void SayTile(size_t tile, int64_t failed) {
    const auto at = static_cast<int64_t>(tile);
    const int64_t head = at / v_.tiles, begin = at % v_.tiles * kTileRows;
    v_.findings.push_back(
        "the whole is within its bound, " + std::to_string(failed) + " of " +
        std::to_string(v_.map.size()) +
        " tiles of a head's rows are not: rows " + std::to_string(begin) +
        " to " + std::to_string(std::min(begin + kTileRows, x_.sizes[2]) - 1) +
        " of head " + std::to_string(head % x_.sizes[1]) + " of batch " +
        std::to_string(head / x_.sizes[1]) + " err " + Times(v_.tile_ratio) +
        " times what they may");
  }
  static std::string Times(double ratio) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.2f", ratio);
    return text;
  }

  const Problem& p_;
  const Array4<double>& x_;
  const Expected& e_;
  DType stored_;
  bool is_lse_;
  double base_;  // of lse
  double count_;
  std::vector<char> empty_rows_;
  std::vector<double> column_weights_;
  // Sum of the columns' squared shares of a row's mean square.
  double column_fourths_ = 0.0;
  double row_twin4_ = 0.0, got_expected_ = 0.0, got2_ = 0.0, stored2_ = 0.0;
  double worst_excess_ = -1.0;
  Sizes worst_ = {0, 0, 0, 0};
  bool element_fails_ = false;
  TensorVerdict v_;
};

}  // namespace

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
  if (name != "lse") return Load(tensor);
  Array4<double> array(p.SizesOf(name));
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

TensorVerdict Judge(const Problem& problem, const std::string& name,
                    const Array4<double>& candidate, const Expected& expected) {
  return Judgement(problem, name, candidate, expected).Run();
}

}  // namespace fa2::verify
