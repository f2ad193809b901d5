// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/check.h"

#include <cmath>
#include <cstring>
#include <map>
#include <optional>

#include "src/verify/cases/error.h"
#include "src/verify/cases/names.h"
#include "src/verify/judge/diagnosis.h"
#include "src/verify/judge/findings.h"
#include "src/verify/model/answer.h"

namespace fa2::verify {
namespace {

// The answer and the twin of one mode, and which array is whose.
struct Truth {
  Answer answer;
  std::optional<Results<float>> twin_f32;
  std::optional<Results<double>> twin_f64;

  Expected Of(const std::string& name) const {
    Expected e;
    e.answer = Member(answer, name);
    if (twin_f32) {
      e.twin_f32 = Narrow(*twin_f32, name);
      if (e.twin_f32 == nullptr) e.twin_f64 = Member(*twin_f32, name);
      e.error = ErrorOf(*twin_f32, name);
    } else {
      e.twin_f64 = Narrow(*twin_f64, name);
      if (e.twin_f64 == nullptr) e.twin_f64 = Member(*twin_f64, name);
      e.error = ErrorOf(*twin_f64, name);
    }
    return e;
  }

 private:
  template <class T>
  static const Array4<T>* Narrow(const Results<T>& r, const std::string& name) {
    if (name == "out") return &r.out;
    if (name == "dq") return &r.dq;
    if (name == "dk") return &r.dk;
    if (name == "dv") return &r.dv;
    return nullptr;
  }
  template <class T>
  static const Array4<double>* Member(const Results<T>& r,
                                      const std::string& name) {
    if constexpr (std::is_same_v<T, double>) {
      if (const auto* narrow = Narrow(r, name)) return narrow;
    }
    if (name == "lse") return &r.lse;
    if (name == "dbias") return &r.dbias;
    if (name == "dsinks") return &r.dsinks;
    return &r.dalibi_slopes;
  }
  template <class T>
  static const Array4<RowError>* ErrorOf(const Results<T>& r,
                                         const std::string& name) {
    if (name == "out") return &r.out_error;
    if (name == "dq") return &r.dq_error;
    if (name == "dk") return &r.dk_error;
    if (name == "dv") return &r.dv_error;
    if (name == "dsinks") return &r.dsinks_error;
    if (name == "dalibi_slopes") return &r.dalibi_error;
    return nullptr;
  }
};

Truth ComputeTruth(const Problem& problem, const Forward* forward,
                   const CheckOptions& options) {
  Truth truth;
  truth.answer = ComputeAnswer(
      problem, forward, options.plain ? Method::kPlain : Method::kKernels,
      options.threads);
  Model model = TwinModel(problem);
  model.given = forward != nullptr;
  if (problem.products == Products::kF64) {
    truth.twin_f64 = RunAll<double>(problem, model, forward, options.threads);
  } else {
    truth.twin_f32 = RunAll<float>(problem, model, forward, options.threads);
  }
  return truth;
}

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

}  // namespace

CaseReport Check(const Case& c, const CheckOptions& options) {
  const auto say = [&](const std::string& text) {
    if (options.progress) options.progress(text);
  };
  const Problem problem = MakeProblem(c);
  CaseReport report;
  report.name = c.name;
  report.what = Describe(problem);
  report.products = problem.products;
  report.unchecked = problem.unchecked;
  report.unread = c.unread;
  report.method = problem.keep.given() ? "blocked f64 with the keep mask"
                  : options.plain      ? "plain f64 loops"
                                       : "fa2's f64 kernels";
  say("the answer in f64 and the rounding twin");
  const Truth chain = ComputeTruth(problem, nullptr, options);
  std::optional<Forward> forward;
  std::optional<Truth> own;
  const bool gradients = problem.dout.given();
  if (gradients && problem.Output("out") != nullptr &&
      problem.Output("lse") != nullptr) {
    say("the gradients from the candidate's own out and lse");
    forward = CandidateForward(problem);
    own = ComputeTruth(problem, &*forward, options);
  }

  std::map<std::string, Array4<double>> candidates;
  for (const auto& [name, tensor] : problem.outputs) {
    candidates[name] = LoadCandidate(problem, name);
  }
  say("judging");
  for (const std::string& name : OutputNames()) {
    if (problem.Output(name) == nullptr) continue;
    const Array4<double>& x = candidates.at(name);
    const Expected expected = chain.Of(name);
    TensorVerdict verdict = Judge(problem, name, x, expected);
    FindPatterns(candidates, *expected.answer, &verdict);
    if (own && name != "out" && name != "lse") {
      const TensorVerdict given = Judge(problem, name, x, own->Of(name));
      // A gradient of the exact out, where all is right, errs from the one of
      // the stored out by what rounding that costs.
      verdict.own = given.pass || (report.pass && verdict.pass);
      verdict.own_relative_l2 = given.relative_l2;
    }
    if (!verdict.pass) {
      FindPlaces(x, *expected.answer, c.shards, &verdict);
    }
    report.pass &= verdict.pass;
    report.tensors.push_back(std::move(verdict));
  }
  if (!report.pass && options.diagnose) {
    say("trying the known mistakes");
    report.diagnosis =
        Diagnose(problem, forward ? &*forward : nullptr, chain.answer,
                 candidates, report.tensors, options.threads);
  }
  return report;
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
