// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/diagnosis.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>

#include "src/verify/judge/evidence.h"
#include "src/verify/judge/mistakes.h"
#include "src/verify/judge/noise.h"
#include "src/verify/judge/rearranged.h"
#include "src/verify/model/parallel.h"

namespace fa2::verify {
namespace {

// The explanation of some failed tensors by one variant of a mistake.
struct Candidate {
  std::string id;
  std::string detail;
  std::set<std::string> tensors;
  int contradictions = 0;  // tensors that are right, and would be wrong
  double error = 0.0;

  int cost() const { return RankOf(id) + 40 * contradictions; }
};

class Diagnoser {
 public:
  Diagnoser(const Problem& problem, const Forward* forward,
            const Answer& answer,
            const std::map<std::string, Array4<double>>& candidates,
            const std::vector<TensorVerdict>& verdicts, int threads)
      : p_(problem),
        forward_(forward),
        answer_(answer),
        candidates_(candidates),
        verdicts_(verdicts),
        threads_(threads) {}

  std::vector<Diagnosis> Run() {
    for (const TensorVerdict& v : verdicts_) {
      if (v.pass) continue;
      // With its own out and lse the gradient is right: it follows from them.
      if (v.own.value_or(false)) {
        following_.insert(v.name);
      } else {
        failing_.insert(v.name);
      }
    }
    if (failing_.empty()) failing_.swap(following_);
    units_ = ChooseUnits(p_, answer_, candidates_, failing_);
    forward_fails_ = failing_.count("out") + failing_.count("lse") > 0;
    for (const Explained& e :
         FindRearranged(p_, answer_, candidates_, verdicts_)) {
      AddExplained(e);
    }
    TryMistakes();
    std::vector<const TensorVerdict*> unexplained;
    for (const TensorVerdict& v : verdicts_) {
      if (failing_.count(v.name) != 0 && !IsExplained(v.name)) {
        unexplained.push_back(&v);
      }
    }
    for (const Explained& e :
         FindNoise(p_, answer_, candidates_, unexplained, threads_)) {
      // Where out is wrong too, the buffer is not what is.
      if (forward_fails_ && e.id == "accumulated_into_garbage") continue;
      AddExplained(e);
    }
    return Choose();
  }

 private:
  bool IsExplained(const std::string& name) const {
    return std::any_of(found_.begin(), found_.end(), [&](const Candidate& c) {
      return c.tensors.count(name) != 0;
    });
  }

  void AddExplained(const Explained& e) {
    if (failing_.count(e.tensor) == 0 && following_.count(e.tensor) == 0) {
      return;
    }
    for (Candidate& c : found_) {
      if (c.id == e.id && c.detail == e.detail) {
        c.tensors.insert(e.tensor);
        c.error = std::max(c.error, e.error);
        return;
      }
    }
    found_.push_back({e.id, e.detail, {e.tensor}, 0, e.error});
  }

  void TryMistakes() {
    const std::vector<Mistake> mistakes =
        MistakesFor(p_, FindHints(p_, answer_, candidates_, failing_));
    const Evidence evidence(p_, forward_, answer_, candidates_, following_,
                            forward_fails_);
    std::mutex mutex;
    std::vector<std::pair<size_t, Candidate>> results;
    ForEach(static_cast<int64_t>(mistakes.size()), threads_, [&](int64_t n) {
      Candidate c = Try(evidence, mistakes[static_cast<size_t>(n)]);
      if (c.tensors.empty()) return;
      const std::lock_guard<std::mutex> lock(mutex);
      results.emplace_back(static_cast<size_t>(n), std::move(c));
    });
    std::sort(results.begin(), results.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    for (auto& [n, c] : results) found_.push_back(std::move(c));
  }

  Candidate Try(const Evidence& evidence, const Mistake& mistake) const {
    Candidate c;
    c.id = mistake.id;
    TensorSums sums;
    const bool likely = Likely(evidence, mistake);
    if (likely) {
      for (const Unit& unit : units_) {
        evidence.AddUnit(mistake, unit, true, &sums);
      }
      Judge(sums, &c);
    }
    bool auxiliary = false, other = false;
    for (const std::string& name : failing_) {
      (Auxiliary(name) ? auxiliary : other) = true;
    }
    if (auxiliary && (!other || !c.tensors.empty())) {
      TensorSums whole;
      evidence.AddAuxiliary(mistake, &whole);
      Judge(whole, &c);
      // What it would do to the gradients that are right.
      if (!likely && !c.tensors.empty()) {
        evidence.AddUnit(mistake, units_.front(), true, &sums);
        Judge(sums, &c);
      }
    }
    return c;
  }

  // One unit in f64 alone: whether the mistake takes half of the error off any
  // failed tensor.
  bool Likely(const Evidence& evidence, const Mistake& mistake) const {
    TensorSums sums;
    evidence.AddUnit(mistake, units_.front(), false, &sums);
    for (const auto& [name, s] : sums) {
      if (failing_.count(name) != 0 && s.to_mistake2 < 0.3 * s.to_answer2 &&
          s.change2 > 0.0) {
        return true;
      }
    }
    return false;
  }

  // Adds a tensor to what the mistake explains, or counts a contradiction.
  void Judge(const TensorSums& sums, Candidate* c) const {
    const double multiple = std::max(2.0, TwinMultiple(p_.products));
    const double unit = p_.products == Products::kF64 ? 0x1p-50 : 0x1p-21;
    for (const auto& [name, s] : sums) {
      const double error = std::sqrt(s.to_mistake2);
      const double allowed =
          multiple * std::sqrt(s.twin2) + unit * std::sqrt(s.mistake2);
      const bool agrees = s.finite && error <= allowed;
      if (failing_.count(name) != 0) {
        if (agrees && s.to_mistake2 < 0.3 * s.to_answer2) {
          c->tensors.insert(name);
          c->error += s.mistake2 > 0.0 ? error / std::sqrt(s.mistake2) : 0.0;
        }
      } else if (!agrees && std::sqrt(s.change2) > allowed) {
        ++c->contradictions;
      }
    }
  }

  // Fewest mistakes that explain the most.
  std::vector<Diagnosis> Choose() {
    std::set<std::string> left = failing_;
    std::vector<Diagnosis> diagnosis;
    std::set<std::string> used;
    while (diagnosis.size() < 3 && !left.empty()) {
      const Candidate* best = nullptr;
      size_t best_count = 0;
      for (const Candidate& c : found_) {
        if (used.count(c.id) != 0) continue;
        size_t count = 0;
        for (const std::string& name : c.tensors) count += left.count(name);
        if (count == 0) continue;
        if (best == nullptr || count > best_count ||
            (count == best_count &&
             (c.cost() < best->cost() ||
              (c.cost() == best->cost() && c.error < best->error)))) {
          best = &c;
          best_count = count;
        }
      }
      if (best == nullptr) break;
      diagnosis.push_back(Named(*best));
      used.insert(best->id);
      for (const std::string& name : best->tensors) left.erase(name);
    }
    AddAlike(&used, &diagnosis);
    return diagnosis;
  }

  // Mistakes that explain as much as the first one does.
  void AddAlike(std::set<std::string>* used,
                std::vector<Diagnosis>* diagnosis) const {
    if (diagnosis->empty()) return;
    const std::vector<std::string> tensors = diagnosis->front().tensors;
    std::vector<const Candidate*> alike;
    for (const Candidate& c : found_) {
      const bool as_much = std::all_of(
          tensors.begin(), tensors.end(),
          [&](const auto& name) { return c.tensors.count(name) != 0; });
      if (as_much) alike.push_back(&c);
    }
    std::stable_sort(alike.begin(), alike.end(),
                     [](const Candidate* a, const Candidate* b) {
                       return a->cost() < b->cost();
                     });
    for (const Candidate* c : alike) {
      if (diagnosis->size() == 3 || !used->insert(c->id).second) continue;
      diagnosis->push_back(Named(*c));
    }
  }

  static Diagnosis Named(const Candidate& c) {
    Diagnosis d;
    d.id = c.id;
    d.sentence = SentenceOf(c.id);
    if (!c.detail.empty()) d.sentence += " (" + c.detail + ")";
    d.tensors.assign(c.tensors.begin(), c.tensors.end());
    return d;
  }

  const Problem& p_;
  const Forward* forward_;
  const Answer& answer_;
  const std::map<std::string, Array4<double>>& candidates_;
  const std::vector<TensorVerdict>& verdicts_;
  int threads_;
  std::set<std::string> failing_, following_;
  bool forward_fails_ = false;
  std::vector<Unit> units_;
  std::vector<Candidate> found_;
};

}  // namespace

std::vector<Diagnosis> Diagnose(
    const Problem& problem, const Forward* forward, const Answer& answer,
    const std::map<std::string, Array4<double>>& candidates,
    const std::vector<TensorVerdict>& verdicts, int threads) {
  return Diagnoser(problem, forward, answer, candidates, verdicts, threads)
      .Run();
}

}  // namespace fa2::verify
