// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/noise.h"

#include <algorithm>
#include <cmath>

namespace fa2::verify {
namespace {

// Twins of whole cases are tried up to this many multiply-adds; a larger case
// is judged by its first heads' worth of them elsewhere.
constexpr double kMostWork = 3e11;

struct Moments {
  double error2 = 0.0, expected2 = 0.0, error_expected = 0.0, got2 = 0.0;
  double constant = 0.0;
  double count = 0.0;
};

Moments MomentsOf(const Array4<double>& x, const Array4<double>& e) {
  Moments m;
  m.count = static_cast<double>(x.values.size());
  for (size_t i = 0; i < x.values.size(); ++i) {
    const double error = x.values[i] - e.values[i];
    m.error2 += error * error;
    m.expected2 += e.values[i] * e.values[i];
    m.error_expected += error * e.values[i];
    m.got2 += x.values[i] * x.values[i];
    m.constant += error / m.count;
  }
  return m;
}

// Whether the error is spread over heads and tiles of rows: none holds more
// than several times its share of rows.
bool Spread(const TensorVerdict& v, double most) {
  double total = 0.0, rows = 0.0;
  for (const SliceError& s : v.map) {
    total += s.error2;
    rows += static_cast<double>(s.rows);
  }
  if (!(total > 0.0)) return false;
  for (const SliceError& s : v.map) {
    if (s.error2 / total > most * static_cast<double>(s.rows) / rows) {
      return false;
    }
  }
  return true;
}

// Whether the error is as large in all rows and columns, as what has nothing to
// do with the gradient is.
bool Even(const Array4<double>& x, const Array4<double>& e) {
  const auto columns = static_cast<size_t>(x.sizes[3]);
  const size_t rows = x.values.size() / columns;
  std::vector<double> by_row(rows, 0.0), by_column(columns, 0.0);
  double total = 0.0;
  for (size_t i = 0; i < x.values.size(); ++i) {
    const double error = x.values[i] - e.values[i];
    by_row[i / columns] += error * error;
    by_column[i % columns] += error * error;
    total += error * error;
  }
  // A mean of n squares of normal variables is within 6 of its deviations.
  const auto even = [total](const std::vector<double>& parts, size_t n) {
    const double mean = total / static_cast<double>(parts.size());
    const double off = 6.0 * std::sqrt(2.0 / static_cast<double>(n)) * mean;
    return std::all_of(parts.begin(), parts.end(), [&](double part) {
      return std::abs(part - mean) <= off;
    });
  };
  return rows > 8 && columns > 8 && even(by_row, columns) &&
         even(by_column, rows);
}

double LowPrecisionError(const Results<float>& twin, const std::string& name,
                         DType stored, const Array4<double>& e) {
  const Array4<float>& t = name == "out"  ? twin.out
                           : name == "dq" ? twin.dq
                           : name == "dk" ? twin.dk
                                          : twin.dv;
  double error2 = 0.0, size2 = 0.0;
  for (size_t i = 0; i < t.values.size(); ++i) {
    const double error = RoundStored(stored, t.values[i]) - e.values[i];
    error2 += error * error;
    size2 += e.values[i] * e.values[i];
  }
  return std::sqrt(error2 / size2);
}

}  // namespace

std::vector<Explained> FindNoise(
    const Problem& problem, const Answer& answer,
    const std::map<std::string, Array4<double>>& candidates,
    const std::vector<const TensorVerdict*>& verdicts, int threads) {
  std::vector<Explained> found;
  std::vector<const TensorVerdict*> small;
  for (const TensorVerdict* v : verdicts) {
    if (v->bad > 0 || !v->relative_l2) continue;
    const bool gradient = v->name == "dq" || v->name == "dk" ||
                          v->name == "dv" || v->name == "dbias";
    if (!gradient && v->name != "out") continue;
    const Array4<double>& e = *MemberOf(answer, v->name);
    const Array4<double>& x = candidates.at(v->name);
    const Moments m = MomentsOf(x, e);
    if (!(m.error2 > 0.0) || !std::isfinite(m.error2)) continue;
    const double relative = std::sqrt(m.error2 / m.expected2);
    // Sums in 16 bits err by a few of their units at most, and may stagnate.
    if (relative < 0.3 && v->name != "dbias") {
      small.push_back(v);
      if (!gradient || relative < 8.0 * v->bound || !Even(x, e)) continue;
    }
    if (!gradient) continue;
    // What the buffer held has nothing to do with the gradient.
    const double cosine = m.error_expected / std::sqrt(m.error2 * m.expected2);
    const double slope = 1.0 + m.error_expected / m.expected2;
    const bool constant = m.constant * m.constant * m.count > 0.98 * m.error2;
    const bool unrelated =
        std::abs(cosine) < 6.0 / std::sqrt(m.count) &&
        std::abs(slope - 1.0) <
            6.0 / std::sqrt(m.count) * std::sqrt(m.error2 / m.expected2) + 0.01;
    if (constant || (unrelated && Spread(*v, 3.0))) {
      found.push_back(
          {"accumulated_into_garbage", v->name, 0.0,
           constant ? "the buffer held " + std::to_string(m.constant) : ""});
    }
  }
  const double work = static_cast<double>(problem.batch * problem.heads) *
                      static_cast<double>(problem.max_q) *
                      static_cast<double>(problem.max_k) *
                      static_cast<double>(problem.head_dim) * 7.0;
  if (small.empty() || work > kMostWork || problem.products == Products::kF64) {
    return found;
  }
  const auto compare = [&](const Model& model, bool of_out) {
    const Results<float> twin = RunAll<float>(problem, model, nullptr, threads);
    for (const TensorVerdict* v : small) {
      if ((v->name == "out") != of_out) continue;
      const double expected =
          LowPrecisionError(twin, v->name, problem.Output(v->name)->view.dtype,
                            *MemberOf(answer, v->name));
      const double ratio = *v->relative_l2 / expected;
      if (ratio > 0.6 && ratio < 1.6 && Spread(*v, 8.0)) {
        found.push_back({"low_precision_accumulation", v->name,
                         std::abs(std::log(ratio)), ""});
      }
    }
  };
  const auto fails = [&](bool out) {
    return std::any_of(small.begin(), small.end(), [out](const auto* v) {
      return (v->name == "out") == out;
    });
  };
  for (const int64_t tile : {64, 32, 16, 128, 8, 1}) {
    if (tile < 16 && work > kMostWork / 100.0) continue;
    for (const bool to_f16 : {false, true}) {
      if (to_f16 && problem.products != Products::kF32 &&
          problem.products != Products::kTF32) {
        continue;
      }
      Model model = TwinModel(problem);
      model.magnitudes = false;
      model.faults.rounded_to_f16 = to_f16;
      model.faults.rounded_tile = tile;
      if (fails(false)) compare(model, false);
      model.faults.rounded_tile = 0;
      model.faults.rounded_out_tile = tile;
      model.gradients = false;
      if (fails(true)) compare(model, true);
    }
  }
  return found;
}

}  // namespace fa2::verify
