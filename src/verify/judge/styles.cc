// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/styles.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "src/verify/judge/evidence.h"
#include "src/verify/judge/units.h"
#include "src/verify/model/rounding.h"

namespace fa2::verify {
namespace {

constexpr double kLog2E = 1.44269504088896340736;

bool PowerOf2(double x) {
  int exponent = 0;
  return std::abs(std::frexp(x, &exponent)) == 0.5;
}

// Each element times the factor, rounded, over the factor.
void Multiply(DType dtype, double factor, Array4<double>* x) {
  if (factor == 0.0) return;
  for (double& value : x->values) {
    if (std::isfinite(value)) {
      value = RoundStored(dtype, value * factor) / factor;
    }
  }
}

// A rounding of 16 bits does not make half of a tensor wrong.
constexpr double kLargestError = 0.5;

// Of the error that the answer leaves, what the style's answer must at most
// leave; the rest of it is the kernel's other roundings.
constexpr double kLeft = 0.6;

// Each is an answer of the whole case: q or k, the passes that it is in.
constexpr size_t kTried = 4;

// The part of the failed tensors' error that the style leaves on one unit.
double Left(const Problem& styled, const Style& style, const Forward* forward,
            const Answer& answer,
            const std::map<std::string, Array4<double>>& candidates,
            const std::set<std::string>& failing, const Unit& unit) {
  const bool forward_fails =
      failing.count("out") + failing.count("lse") > 0 && style.in_forward;
  const std::set<std::string> ignored;
  const Evidence evidence(styled, forward, answer, candidates, ignored,
                          forward_fails);
  Mistake none;
  none.same_given = !style.in_backward;
  TensorSums sums;
  evidence.AddUnit(none, unit, false, &sums);
  double left = 0.0, all = 0.0;
  for (const auto& [name, s] : sums) {
    if (failing.count(name) == 0 || !(s.mistake2 > 0.0)) continue;
    left += s.to_mistake2 / s.mistake2;
    all += s.to_answer2 / s.mistake2;
  }
  return all > 0.0 ? left / all : 1.0;
}

}  // namespace

std::vector<Style> LikelyStyles(
    const Problem& p, const Forward* forward, const Answer& answer,
    const std::map<std::string, Array4<double>>& candidates,
    const std::vector<TensorVerdict>& verdicts) {
  std::set<std::string> failing;
  for (const TensorVerdict& v : verdicts) {
    if (v.pass) continue;
    if (!v.relative_l2 || !(*v.relative_l2 < kLargestError)) return {};
    failing.insert(v.name);
  }
  const std::vector<Unit> units = ChooseUnits(p, answer, candidates, failing);
  std::vector<std::pair<double, Style>> likely;
  for (const Style& style : StylesFor(p)) {
    // Without the candidate's own forward the passes are not told apart.
    if (forward == nullptr && !(style.in_forward && style.in_backward)) {
      continue;
    }
    const double left = Left(Styled(p, style), style, forward, answer,
                             candidates, failing, units.front());
    if (left < kLeft) likely.emplace_back(left, style);
  }
  std::stable_sort(
      likely.begin(), likely.end(),
      [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Style> styles;
  for (size_t n = 0; n < std::min(kTried, likely.size()); ++n) {
    styles.push_back(likely[n].second);
  }
  return styles;
}

std::vector<Style> StylesFor(const Problem& p) {
  std::vector<Style> styles;
  const bool rounds =
      p.products == Products::kBF16 || p.products == Products::kF16;
  if (!rounds || !(p.scale > 0.0)) return styles;
  struct Factor {
    const char* name;
    double value;
  };
  const Factor factors[] = {{"scale", p.scale},
                            {"scale * log2(e)", p.scale * kLog2E}};
  for (const Factor& factor : factors) {
    if (PowerOf2(factor.value)) continue;
    for (const bool of_k : {false, true}) {
      for (const bool in_forward : {true, false}) {
        for (const bool in_backward : {true, false}) {
          if (!in_forward && !in_backward) continue;
          Style style;
          style.name = std::string(of_k ? "k" : "q") + " * " + factor.name;
          (of_k ? style.k_factor : style.q_factor) = factor.value;
          style.in_forward = in_forward;
          style.in_backward = in_backward;
          styles.push_back(style);
        }
      }
    }
  }
  const double root = std::sqrt(p.scale);
  if (!PowerOf2(root)) {
    Style style;
    style.name = "q and k * sqrt(scale)";
    style.q_factor = style.k_factor = root;
    styles.push_back(style);
  }
  return styles;
}

Problem Styled(const Problem& problem, const Style& style) {
  Problem p = problem;
  const DType dtype = p.products == Products::kF16 ? DType::kF16 : DType::kBF16;
  p.q_rounded = style.q_factor != 0.0;
  p.k_rounded = style.k_factor != 0.0;
  Multiply(dtype, style.q_factor, &p.q);
  Multiply(dtype, style.k_factor, &p.k);
  return p;
}

}  // namespace fa2::verify
