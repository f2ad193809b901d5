// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>

#include "src/verify/cases/error.h"
#include "src/verify/cases/names.h"
#include "src/verify/judge/diagnosis.h"
#include "src/verify/judge/findings.h"
#include "src/verify/judge/styles.h"
#include "src/verify/judge/truth.h"
#include "src/verify/model/answer.h"

namespace fa2::verify {
namespace {

std::string Describe(const Problem& p) {
  const auto n = [](int64_t x) { return std::to_string(x); };
  std::string text = std::string(fa2::NameOf(p.source.Find("q")->dtype)) +
                     " B" + n(p.batch) + " H" + n(p.heads);
  if (p.kv_heads != p.heads) text += "/" + n(p.kv_heads);
  text += " " + n(p.nq) + "x" + n(p.nk) + " D" + n(p.head_dim);
  if (p.value_dim != p.head_dim) text += "/" + n(p.value_dim);
  if (p.options.causal == Causal::kTopLeft) text += " causal top-left";
  if (p.options.causal == Causal::kBottomRight) text += " causal bottom-right";
  if (p.options.window_left >= 0 || p.options.window_right >= 0) {
    text +=
        " window " + n(p.options.window_left) + "," + n(p.options.window_right);
  }
  if (p.packed)
    text += " " + n(static_cast<int64_t>(p.sequences.size())) + " sequences";
  if (p.options.softcap > 0.0) text += " softcap";
  if (p.bias.given()) text += p.bias_is_mask ? " mask" : " bias";
  if (p.alibi_slopes.given()) text += " ALiBi";
  if (p.sinks.given()) text += " sinks";
  if (p.options.dropout_p > 0.0 || p.keep.given()) text += " dropout";
  return text;
}

// Judges one candidate, whose tensors are `candidates`.
class Checker {
 public:
  Checker(const Case& c, const CheckOptions& options)
      : case_(c), options_(options), problem_(MakeProblem(c)) {
    for (const auto& [name, tensor] : problem_.outputs) {
      candidates_[name] = LoadCandidate(problem_, name);
    }
    if (problem_.dout.given() && problem_.Output("out") != nullptr &&
        problem_.Output("lse") != nullptr) {
      forward_ = CandidateForward(problem_);
    }
  }

  CaseReport Run() {
    CaseReport report;
    report.name = case_.name;
    report.what = Describe(problem_);
    report.products = problem_.products;
    report.unchecked = problem_.unchecked;
    report.unread = case_.unread;
    report.method = NeedsModel(problem_) ? "blocked f64"
                    : options_.plain     ? "plain f64 loops"
                                         : "fa2's f64 kernels";
    Say("the answer in f64 and the rounding twin");
    const Truth chain = Compute(problem_, nullptr);
    std::optional<Truth> own;
    if (forward_) {
      Say("the gradients from the candidate's own out and lse");
      own = Compute(problem_, &*forward_);
    }
    Say("judging");
    report.tensors = JudgeAll(chain, chain, own ? &*own : nullptr);
    report.pass = AllPass(report.tensors);
    if (!report.pass) TryStyles(chain, &report);
    for (TensorVerdict& verdict : report.tensors) {
      if (verdict.pass) continue;
      FindPlaces(candidates_.at(verdict.name), *chain.Of(verdict.name).answer,
                 case_.shards, &verdict);
    }
    if (!report.pass && options_.diagnose) {
      Say("trying the known mistakes");
      report.diagnosis =
          Diagnose(problem_, forward_ ? &*forward_ : nullptr, chain.answer,
                   candidates_, report.tensors, options_.threads);
    }
    return report;
  }

 private:
  void Say(const std::string& text) const {
    if (options_.progress) options_.progress(text);
  }

  Truth Compute(const Problem& problem, const Forward* forward) const {
    return ComputeTruth(problem, forward, options_.plain, options_.threads);
  }

  static bool AllPass(const std::vector<TensorVerdict>& verdicts) {
    return std::all_of(verdicts.begin(), verdicts.end(),
                       [](const TensorVerdict& v) { return v.pass; });
  }

  // `gradients`: the truth that these are held against. `own`: the one of the
  // candidate's out and lse, or nullptr.
  std::vector<TensorVerdict> JudgeAll(const Truth& forward,
                                      const Truth& gradients,
                                      const Truth* own) const {
    std::vector<TensorVerdict> verdicts;
    bool forward_passes = true;
    for (const std::string& name : OutputNames()) {
      if (problem_.Output(name) == nullptr) continue;
      const Array4<double>& x = candidates_.at(name);
      const bool is_forward = name == "out" || name == "lse";
      const Expected expected = (is_forward ? forward : gradients).Of(name);
      TensorVerdict verdict = Judge(problem_, name, x, expected);
      FindPatterns(candidates_, *expected.answer, &verdict);
      if (is_forward) forward_passes &= verdict.pass;
      if (own != nullptr && !is_forward) {
        const TensorVerdict given = Judge(problem_, name, x, own->Of(name));
        // A gradient of the exact out, where all is right, errs from the one of
        // the stored out by what rounding that costs.
        verdict.own = given.pass || (forward_passes && verdict.pass);
        verdict.own_relative_l2 = given.relative_l2;
      }
      verdicts.push_back(std::move(verdict));
    }
    return verdicts;
  }

  // Where the candidate is right for operands that it has rounded once more, it
  // passes. What is reported stays the error from the answer.
  void TryStyles(const Truth& chain, CaseReport* report) const {
    for (const Style& style :
         LikelyStyles(problem_, forward_ ? &*forward_ : nullptr, chain.answer,
                      candidates_, report->tensors)) {
      Say("the answer for " + style.name + ", rounded");
      if (TryStyle(style, chain, report)) return;
    }
  }

  bool TryStyle(const Style& style, const Truth& chain,
                CaseReport* report) const {
    const Problem styled = Styled(problem_, style);
    const Problem& backward_problem = style.in_backward ? styled : problem_;
    const Truth forward = style.in_forward ? Compute(styled, nullptr) : Truth();
    const Truth& of_forward = style.in_forward ? forward : chain;
    std::optional<Truth> backward;
    if (problem_.dout.given() && style.in_forward != style.in_backward) {
      const Forward given = {of_forward.answer.out, of_forward.answer.lse};
      backward = Compute(backward_problem, &given);
    }
    const Truth& of_gradients = backward ? *backward : of_forward;
    std::optional<Truth> own;
    if (forward_) own = Compute(backward_problem, &*forward_);
    std::vector<TensorVerdict> verdicts =
        JudgeAll(of_forward, of_gradients, own ? &*own : nullptr);
    if (!AllPass(verdicts)) return false;
    report->pass = true;
    report->style = style.name;
    for (size_t n = 0; n < verdicts.size(); ++n) {
      const TensorVerdict& before = report->tensors[n];
      TensorVerdict& v = verdicts[n];
      const bool is_forward = v.name == "out" || v.name == "lse";
      v.bound +=
          Distance(*(is_forward ? of_forward : of_gradients).Of(v.name).answer,
                   *chain.Of(v.name).answer);
      v.relative_l2 = before.relative_l2;
      v.cosine = before.cosine;
      v.worst.expected = before.worst.index == v.worst.index
                             ? before.worst.expected
                             : v.worst.expected;
    }
    report->tensors = std::move(verdicts);
    return true;
  }

  static double Distance(const Array4<double>& a, const Array4<double>& b) {
    double error2 = 0.0, size2 = 0.0;
    for (size_t i = 0; i < a.values.size(); ++i) {
      const double error = a.values[i] - b.values[i];
      if (!std::isfinite(error)) continue;
      error2 += error * error;
      size2 += b.values[i] * b.values[i];
    }
    return size2 > 0.0 ? std::sqrt(error2 / size2) : 0.0;
  }

  const Case& case_;
  const CheckOptions& options_;
  Problem problem_;
  std::map<std::string, Array4<double>> candidates_;
  std::optional<Forward> forward_;  // the candidate's out and lse
};

}  // namespace

CaseReport Check(const Case& c, const CheckOptions& options) {
  return Checker(c, options).Run();
}

void CompareRuns(const Case& first, const Case& other,
                 const std::string& other_name, CaseReport* report) {
  for (const std::string& name : OutputNames()) {
    const Array* a = first.Find(name);
    const Array* b = other.Find(name);
    if (a == nullptr || b == nullptr) continue;
    if (a->shape != b->shape || a->dtype != b->dtype) {
      throw Error(other_name + ": tensor " + name +
                  " has another shape or dtype than in the first run");
    }
    const size_t size = SizeOf(a->dtype);
    const auto* x = static_cast<const uint8_t*>(a->data);
    const auto* y = static_cast<const uint8_t*>(b->data);
    int64_t moved = 0, first_moved = -1, last_moved = -1;
    for (int64_t i = 0; i < a->elements(); ++i) {
      if (std::memcmp(x + static_cast<size_t>(i) * size,
                      y + static_cast<size_t>(i) * size, size) != 0) {
        ++moved;
        if (first_moved < 0) first_moved = i;
        last_moved = i;
      }
    }
    if (moved == 0) continue;
    const auto index = [&](int64_t i) {
      std::vector<int64_t> at(a->shape.size());
      for (size_t d = at.size(); d-- > 0;) {
        at[d] = i % a->shape[d];
        i /= a->shape[d];
      }
      std::string text = "[";
      for (size_t d = 0; d < at.size(); ++d) {
        text += (d > 0 ? ", " : "") + std::to_string(at[d]);
      }
      return text + "]";
    };
    report->pass = false;
    report->moved.push_back(
        name + " moves from run to run: " + std::to_string(moved) + " of " +
        std::to_string(a->elements()) + " elements differ in " + other_name +
        ", from " + index(first_moved) + " to " + index(last_moved) +
        ": a race, or atomics");
  }
}

}  // namespace fa2::verify
