// SPDX-License-Identifier: Apache-2.0
#include "src/verify/diagnosis.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>

#include "src/verify/mistakes.h"
#include "src/verify/noise.h"
#include "src/verify/parallel.h"
#include "src/verify/rearranged.h"

namespace fa2::verify {
namespace {

constexpr double kLn2 = 0.69314718055994530942;

// Multiply-adds that confirming one mistake may take: few heads of a large
// case, all of a small one.
constexpr double kWorkPerMistake = 4e9;

// A sequence and a kv head: what shares dK and dV.
struct Unit {
  const Sequence* sequence;
  int64_t kv_head;
  double error = 0.0;
};

// Squared errors of a tensor over some units.
struct Sums {
  double to_mistake2 = 0.0;  // candidate - mistake
  double to_answer2 = 0.0;   // candidate - answer
  double mistake2 = 0.0;
  double twin2 = 0.0;    // mistake's twin - mistake
  double change2 = 0.0;  // mistake - answer
  bool finite = true;
};

using TensorSums = std::map<std::string, Sums>;

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
    ChooseUnits();
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

  // Worst first, where the failed tensors are judged by their squared error
  // over the squared size of the whole.
  void ChooseUnits() {
    for (const Sequence& s : p_.sequences) {
      for (int64_t g = 0; g < p_.kv_heads; ++g) units_.push_back({&s, g, 0.0});
    }
    for (const std::string& name : failing_) {
      if (name == "dbias" || name == "dsinks" || name == "dalibi_slopes") {
        continue;
      }
      const Array4<double>& x = candidates_.at(name);
      const Array4<double>& e = *MemberOf(answer_, name);
      double total = 0.0;
      for (const double value : e.values) {
        if (std::isfinite(value)) total += value * value;
      }
      for (Unit& unit : units_) {
        const bool keys = name == "dk" || name == "dv";
        const int64_t first = keys ? unit.kv_head : unit.kv_head * p_.group();
        const int64_t last = keys ? first + 1 : first + p_.group();
        const Sequence& s = *unit.sequence;
        const int64_t begin = keys ? s.k_begin : s.q_begin;
        const int64_t rows = keys ? s.nk : s.nq;
        for (int64_t h = first; h < last; ++h) {
          const double* got = x.row(s.batch, h, begin);
          const double* expected = e.row(s.batch, h, begin);
          for (int64_t i = 0; i < rows * x.sizes[3]; ++i) {
            const double error = got[i] - expected[i];
            if (std::isfinite(error)) {
              unit.error += error * error / std::max(total, 1e-300);
            }
          }
        }
      }
    }
    std::stable_sort(
        units_.begin(), units_.end(),
        [](const Unit& a, const Unit& b) { return a.error > b.error; });
    const double work = static_cast<double>(p_.group()) *
                        static_cast<double>(p_.max_q) *
                        static_cast<double>(p_.max_k) *
                        static_cast<double>(p_.head_dim + p_.value_dim) * 3.5;
    const auto most =
        static_cast<size_t>(std::clamp(kWorkPerMistake / work, 1.0, 64.0));
    if (units_.size() > most) units_.resize(most);
  }

  static bool Auxiliary(const std::string& name) {
    return name == "dbias" || name == "dsinks" || name == "dalibi_slopes";
  }

  void TryMistakes() {
    const std::vector<Mistake> mistakes = MistakesFor(p_);
    std::mutex mutex;
    std::vector<std::pair<size_t, Candidate>> results;
    ForEach(static_cast<int64_t>(mistakes.size()), threads_, [&](int64_t n) {
      Candidate c = Try(mistakes[static_cast<size_t>(n)]);
      if (c.tensors.empty()) return;
      const std::lock_guard<std::mutex> lock(mutex);
      results.emplace_back(static_cast<size_t>(n), std::move(c));
    });
    std::sort(results.begin(), results.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    for (auto& [n, c] : results) found_.push_back(std::move(c));
  }

  Candidate Try(const Mistake& mistake) {
    Candidate c;
    c.id = mistake.id;
    TensorSums sums;
    const bool likely = Likely(mistake);
    if (likely) {
      for (const Unit& unit : units_) AddUnit(mistake, unit, true, &sums);
      Judge(sums, &c);
    }
    bool auxiliary = false, other = false;
    for (const std::string& name : failing_) {
      (Auxiliary(name) ? auxiliary : other) = true;
    }
    if (auxiliary && (!other || !c.tensors.empty())) {
      TensorSums whole;
      AddAuxiliary(mistake, &whole);
      Judge(whole, &c);
      // What it would do to the gradients that are right.
      if (!likely && !c.tensors.empty()) {
        AddUnit(mistake, units_.front(), true, &sums);
        Judge(sums, &c);
      }
    }
    return c;
  }

  // One unit in f64 alone: whether the mistake takes half of the error off any
  // failed tensor.
  bool Likely(const Mistake& mistake) {
    TensorSums sums;
    AddUnit(mistake, units_.front(), false, &sums);
    for (const auto& [name, s] : sums) {
      if (failing_.count(name) != 0 && s.to_mistake2 < 0.3 * s.to_answer2 &&
          s.change2 > 0.0) {
        return true;
      }
    }
    return false;
  }

  // Adds a tensor to what the mistake explains, or counts a contradiction.
  void Judge(const TensorSums& sums, Candidate* c) {
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

  bool Wanted(const std::string& name) const {
    return p_.Output(name) != nullptr && !Auxiliary(name) &&
           following_.count(name) == 0;
  }

  // One tensor of one head or kv head.
  void Compare(const std::string& name, int64_t head, int64_t begin,
               const Sequence& s, const double* mistake,
               const std::vector<double>* twin, int64_t count,
               TensorSums* sums) const {
    Sums& sum = (*sums)[name];
    const double base = name == "lse" && p_.options.lse_base2 ? 1 / kLn2 : 1.0;
    const double* got = candidates_.at(name).row(s.batch, head, begin);
    const double* answer = MemberOf(answer_, name)->row(s.batch, head, begin);
    const DType stored = p_.Output(name)->view.dtype;
    for (int64_t i = 0; i < count; ++i) {
      const double m = mistake[i] * base;
      const double a = answer[i] * base;
      if (!std::isfinite(got[i])) {
        // Overflow is what the mistake leads to, or it is not.
        if (std::isfinite(m) && std::abs(m) < 65504.0 && std::isfinite(a)) {
          sum.finite = false;
        }
        continue;
      }
      if (!std::isfinite(m) || !std::isfinite(a)) continue;
      sum.to_mistake2 += (got[i] - m) * (got[i] - m);
      sum.to_answer2 += (got[i] - a) * (got[i] - a);
      sum.mistake2 += m * m;
      sum.change2 += (m - a) * (m - a);
      if (twin != nullptr) {
        const double t =
            RoundStored(stored, (*twin)[static_cast<size_t>(i)] * base);
        if (std::isfinite(t)) sum.twin2 += (t - m) * (t - m);
      }
    }
  }

  // What the mistake gives on a unit: out, lse, dq by head, and dk, dv.
  struct UnitResults {
    std::vector<int64_t> heads;
    std::vector<std::vector<double>> out, lse, dq;
    std::vector<double> dk, dv;
  };

  template <class T>
  UnitResults RunUnit(const Model& model, const Unit& unit) const {
    const Faults& f = model.faults;
    std::set<int64_t> heads;
    const std::vector<int64_t> mapped = QueryHeads(p_, f, unit.kv_head);
    const std::vector<int64_t> own = QueryHeads(p_, Faults(), unit.kv_head);
    heads.insert(mapped.begin(), mapped.end());
    heads.insert(own.begin(), own.end());
    UnitResults r;
    int64_t member = 0;
    for (const int64_t h : heads) {
      const bool joins = std::count(mapped.begin(), mapped.end(), h) > 0;
      const HeadResults<T> head =
          RunHead<T>(p_, model, model.given ? forward_ : nullptr,
                     *unit.sequence, h, KvHead(p_, f, h));
      if (std::count(own.begin(), own.end(), h) > 0) {
        r.heads.push_back(h);
        r.out.emplace_back(head.out.begin(), head.out.end());
        r.lse.push_back(head.stored_lse);
        r.dq.emplace_back(head.dq.begin(), head.dq.end());
      }
      if (joins) {
        if (f.group_member < 0 || f.group_member == member) {
          r.dk.resize(head.dk.size());
          r.dv.resize(head.dv.size());
          for (size_t i = 0; i < head.dk.size(); ++i) r.dk[i] += head.dk[i];
          for (size_t i = 0; i < head.dv.size(); ++i) r.dv[i] += head.dv[i];
        }
        ++member;
      }
    }
    return r;
  }

  UnitResults RunTwin(Model model, const Unit& unit) const {
    const Model twin = TwinModel(p_);
    model.products = twin.products;
    model.out = twin.out;
    model.f32_lse = twin.f32_lse;
    return p_.products == Products::kF64 ? RunUnit<double>(model, unit)
                                         : RunUnit<float>(model, unit);
  }

  void AddUnit(const Mistake& mistake, const Unit& unit, bool with_twin,
               TensorSums* sums) const {
    const bool forward_wanted =
        mistake.faults.in_forward &&
        (failing_.count("out") != 0 || failing_.count("lse") != 0);
    Model model;
    model.faults = mistake.faults;
    if (forward_ != nullptr) {
      if (forward_wanted) {
        model.gradients = false;
        AddRun(model, unit, with_twin, true, false, sums);
      }
      if (!mistake.faults.in_backward || mistake.same_given) return;
      model.gradients = true;
      model.given = true;
      AddRun(model, unit, with_twin, false, true, sums);
    } else {
      AddRun(model, unit, with_twin, true, true, sums);
    }
  }

  void AddRun(const Model& model, const Unit& unit, bool with_twin,
              bool forward, bool gradients, TensorSums* sums) const {
    const UnitResults m = RunUnit<double>(model, unit);
    UnitResults t;
    if (with_twin) t = RunTwin(model, unit);
    const Sequence& s = *unit.sequence;
    const auto twin_of = [&](const std::vector<double>& values) {
      return with_twin ? &values : nullptr;
    };
    for (size_t n = 0; n < m.heads.size(); ++n) {
      const auto compare = [&](const char* name,
                               const std::vector<std::vector<double>>& values,
                               const std::vector<std::vector<double>>& twin) {
        if (!Wanted(name) || values[n].empty()) return;
        Compare(name, m.heads[n], s.q_begin, s, values[n].data(),
                with_twin ? &twin[n] : nullptr,
                static_cast<int64_t>(values[n].size()), sums);
      };
      if (forward) compare("out", m.out, t.out);
      if (forward) compare("lse", m.lse, t.lse);
      if (gradients) compare("dq", m.dq, t.dq);
    }
    if (!gradients) return;
    if (Wanted("dk") && !m.dk.empty()) {
      Compare("dk", unit.kv_head, s.k_begin, s, m.dk.data(), twin_of(t.dk),
              static_cast<int64_t>(m.dk.size()), sums);
    }
    if (Wanted("dv") && !m.dv.empty()) {
      Compare("dv", unit.kv_head, s.k_begin, s, m.dv.data(), twin_of(t.dv),
              static_cast<int64_t>(m.dv.size()), sums);
    }
  }

  // Gradients that are summed over heads or batches need all of them.
  void AddAuxiliary(const Mistake& mistake, TensorSums* sums) const {
    if (forward_ != nullptr &&
        (!mistake.faults.in_backward || mistake.same_given)) {
      return;
    }
    Model model;
    model.faults = mistake.faults;
    model.given = forward_ != nullptr;
    const Results<double> m = RunAll<double>(p_, model, forward_, 1);
    Model twin = TwinModel(p_);
    twin.magnitudes = false;
    twin.faults = model.faults;
    twin.given = model.given;
    Results<double> t;
    if (p_.products == Products::kF64) {
      t = RunAll<double>(p_, twin, forward_, 1);
    } else {
      Results<float> f = RunAll<float>(p_, twin, forward_, 1);
      t.dbias = std::move(f.dbias);
      t.dsinks = std::move(f.dsinks);
      t.dalibi_slopes = std::move(f.dalibi_slopes);
    }
    for (const char* name : {"dbias", "dsinks", "dalibi_slopes"}) {
      if (p_.Output(name) == nullptr) continue;
      const Array4<double>& values = *MemberOf(m, name);
      const Array4<double>& twins = *MemberOf(t, name);
      Sums& sum = (*sums)[name];
      const Array4<double>& got = candidates_.at(name);
      const Array4<double>& answer = *MemberOf(answer_, name);
      const DType stored = p_.Output(name)->view.dtype;
      for (size_t i = 0; i < values.values.size(); ++i) {
        const double x = values.values[i], g = got.values[i];
        if (!std::isfinite(g)) sum.finite = false;
        sum.to_mistake2 += (g - x) * (g - x);
        sum.to_answer2 += (g - answer.values[i]) * (g - answer.values[i]);
        sum.mistake2 += x * x;
        sum.change2 += (x - answer.values[i]) * (x - answer.values[i]);
        const double tw = RoundStored(stored, twins.values[i]) - x;
        sum.twin2 += tw * tw;
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
      Diagnosis d;
      d.id = best->id;
      d.sentence = SentenceOf(best->id);
      if (!best->detail.empty()) d.sentence += " (" + best->detail + ")";
      d.tensors.assign(best->tensors.begin(), best->tensors.end());
      used.insert(best->id);
      for (const std::string& name : best->tensors) left.erase(name);
      diagnosis.push_back(std::move(d));
    }
    return diagnosis;
  }

  const Problem& p_;
  const Forward* forward_;
  const Answer& answer_;
  const std::map<std::string, Array4<double>>& candidates_;
  const std::vector<TensorVerdict>& verdicts_;
  int threads_;
  std::set<std::string> failing_, following_;
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
