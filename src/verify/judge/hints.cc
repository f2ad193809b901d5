// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/hints.h"

#include <algorithm>
#include <cmath>

namespace fa2::verify {
namespace {

constexpr double kLn2 = 0.69314718055994530942;

// Rows at the end of the array that are zero in all heads and batches.
int64_t ZeroRows(const Array4<double>& x) {
  const Sizes& n = x.sizes;
  for (int64_t zero = 0; zero < n[2]; ++zero) {
    for (int64_t a = 0; a < n[0]; ++a) {
      for (int64_t b = 0; b < n[1]; ++b) {
        const double* row = x.row(a, b, n[2] - 1 - zero);
        if (std::any_of(row, row + n[3], [](double v) { return v != 0.0; })) {
          return zero;
        }
      }
    }
  }
  return n[2];
}

// How many scores of 0 make the answer's lse the candidate's, where it is the
// same whole number in all rows that differ.
int64_t MoreKeys(const Problem& p, const Array4<double>& lse,
                 const Array4<double>& answer) {
  const double base = p.options.lse_base2 ? kLn2 : 1.0;
  int64_t keys = 0;
  for (size_t i = 0; i < lse.values.size(); ++i) {
    const double got = std::exp(lse.values[i] * base);
    const double expected = std::exp(answer.values[i]);
    const double more = got - expected;
    // Of a large sum, lse in f32 does not hold single keys.
    if (!std::isfinite(more) || more < 1e-3 * expected) continue;
    const double whole = std::round(more);
    if (whole < 1.0 || std::abs(more - whole) > 0.05 * whole) return 0;
    if (keys != 0 && static_cast<double>(keys) != whole) return 0;
    keys = static_cast<int64_t>(std::min(whole, 1e9));
  }
  return keys;
}

}  // namespace

Hints FindHints(const Problem& p, const Answer& answer,
                const std::map<std::string, Array4<double>>& candidates,
                const std::set<std::string>& failing) {
  Hints hints;
  hints.failing = failing;
  const auto find = [&](const char* name) -> const Array4<double>* {
    const auto found = candidates.find(name);
    return found == candidates.end() ? nullptr : &found->second;
  };
  if (const auto* dk = find("dk")) {
    hints.zero_keys = ZeroRows(*dk);
    hints.zero_keys_of_answer = ZeroRows(answer.dk);
  } else if (const auto* dv = find("dv")) {
    hints.zero_keys = ZeroRows(*dv);
    hints.zero_keys_of_answer = ZeroRows(answer.dv);
  }
  if (const auto* dq = find("dq")) hints.zero_queries = ZeroRows(*dq);
  if (const auto* lse = find("lse"); lse != nullptr && hints.Fails("lse")) {
    hints.more_keys = MoreKeys(p, *lse, answer.lse);
  }
  return hints;
}

}  // namespace fa2::verify
