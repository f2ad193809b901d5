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

double LowPrecisionError(const Results<float>& twin, const std::string& name,
                         DType stored, const Array4<double>& e) {
  const Array4<float>& t = name == "dq"   ? twin.dq
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
    if (v->name != "dq" && v->name != "dk" && v->name != "dv" &&
        v->name != "dbias") {
      continue;
    }
    const Array4<double>& e = *MemberOf(answer, v->name);
    const Array4<double>& x = candidates.at(v->name);
    const Moments m = MomentsOf(x, e);
    if (!(m.error2 > 0.0) || !std::isfinite(m.error2)) continue;
    const double relative = std::sqrt(m.error2 / m.expected2);
    // Sums in 16 bits err by a few of their units at most, and may stagnate.
    if (relative < 0.3 && v->name != "dbias") {
      small.push_back(v);
      continue;
    }
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
  for (const int64_t tile : {64, 32, 16, 128, 8, 1}) {
    if (tile < 16 && work > kMostWork / 100.0) continue;
    Model model = TwinModel(problem);
    model.magnitudes = false;
    model.faults.rounded_tile = tile;
    const Results<float> twin = RunAll<float>(problem, model, nullptr, threads);
    for (const TensorVerdict* v : small) {
      const double expected =
          LowPrecisionError(twin, v->name, problem.Output(v->name)->view.dtype,
                            *MemberOf(answer, v->name));
      const double ratio = *v->relative_l2 / expected;
      if (ratio > 0.6 && ratio < 1.6 && Spread(*v, 8.0)) {
        found.push_back({"low_precision_accumulation", v->name,
                         std::abs(std::log(ratio)), ""});
      }
    }
  }
  return found;
}

}  // namespace fa2::verify
