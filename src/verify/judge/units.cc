// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/units.h"

#include <algorithm>
#include <cmath>

#include "src/verify/judge/rearranged.h"

namespace fa2::verify {
namespace {

// Multiply-adds that confirming one mistake may take: few heads of a large
// case, all of a small one.
constexpr double kWorkPerMistake = 4e9;

double SumOfSquares(const std::vector<double>& x) {
  double sum = 0.0;
  for (const double value : x) {
    if (std::isfinite(value)) sum += value * value;
  }
  return sum;
}

// Squared error of a tensor's rows that belong to the unit.
double ErrorOf(const Problem& p, const std::string& name, const Unit& unit,
               const Array4<double>& x, const Array4<double>& e) {
  const bool keys = name == "dk" || name == "dv";
  const int64_t first = keys ? unit.kv_head : unit.kv_head * p.group();
  const int64_t last = keys ? first + 1 : first + p.group();
  const Sequence& s = *unit.sequence;
  const int64_t count = (keys ? s.nk : s.nq) * x.sizes[3];
  double sum = 0.0;
  for (int64_t h = first; h < last; ++h) {
    const double* got = x.row(s.batch, h, keys ? s.k_begin : s.q_begin);
    const double* expected = e.row(s.batch, h, keys ? s.k_begin : s.q_begin);
    for (int64_t i = 0; i < count; ++i) {
      const double error = got[i] - expected[i];
      if (std::isfinite(error)) sum += error * error;
    }
  }
  return sum;
}

}  // namespace

bool Auxiliary(const std::string& name) {
  return name == "dbias" || name == "dsinks" || name == "dalibi_slopes";
}

std::vector<Unit> ChooseUnits(
    const Problem& p, const Answer& answer,
    const std::map<std::string, Array4<double>>& candidates,
    const std::set<std::string>& failing) {
  std::vector<Unit> units;
  for (const Sequence& s : p.sequences) {
    for (int64_t g = 0; g < p.kv_heads; ++g) units.push_back({&s, g, 0.0});
  }
  for (const std::string& name : failing) {
    if (Auxiliary(name)) continue;
    const Array4<double>& x = candidates.at(name);
    const Array4<double>& e = *MemberOf(answer, name);
    const double total = std::max(SumOfSquares(e.values), 1e-300);
    for (Unit& unit : units) unit.error += ErrorOf(p, name, unit, x, e) / total;
  }
  std::stable_sort(
      units.begin(), units.end(),
      [](const Unit& a, const Unit& b) { return a.error > b.error; });
  const double work = static_cast<double>(p.group()) *
                      static_cast<double>(p.max_q) *
                      static_cast<double>(p.max_k) *
                      static_cast<double>(p.head_dim + p.value_dim) * 3.5;
  const auto most =
      static_cast<size_t>(std::clamp(kWorkPerMistake / work, 1.0, 64.0));
  if (units.size() > most) units.resize(most);
  return units;
}

}  // namespace fa2::verify
