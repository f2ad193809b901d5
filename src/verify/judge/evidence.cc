// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/evidence.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "src/verify/judge/rearranged.h"
#include "src/verify/model/head_operands.h"

namespace fa2::verify {
namespace {

constexpr double kLn2 = 0.69314718055994530942;

}  // namespace

// What the mistake gives on a unit: out, lse and dq by head, and dk, dv.
struct Evidence::UnitResults {
  std::vector<int64_t> heads;
  std::vector<std::vector<double>> out, lse, dq;
  std::vector<double> dk, dv;
};

void Sums::Add(double got, double mistake, double answer) {
  if (!std::isfinite(got)) {
    // Overflow is what the mistake leads to, or it is not.
    if (std::isfinite(mistake) && std::abs(mistake) < 65504.0 &&
        std::isfinite(answer)) {
      finite = false;
    }
    return;
  }
  if (!std::isfinite(mistake) || !std::isfinite(answer)) return;
  to_mistake2 += (got - mistake) * (got - mistake);
  to_answer2 += (got - answer) * (got - answer);
  mistake2 += mistake * mistake;
  change2 += (mistake - answer) * (mistake - answer);
}

bool Evidence::Wanted(const std::string& name) const {
  return p_.Output(name) != nullptr && !Auxiliary(name) &&
         ignored_.count(name) == 0;
}

// One tensor of one head or kv head; `swapped`: it lies where the other order
// of heads and rows has it. `lse`, of rows of queries: where it is -inf the
// mistake leaves no key to see, and a kernel may divide by 0.
void Evidence::Compare(const std::string& name, int64_t head, int64_t begin,
                       const Sequence& s, bool swapped,
                       const std::vector<double>& mistake,
                       const std::vector<double>* twin,
                       const std::vector<double>* lse, TensorSums* sums) const {
  if (!Wanted(name) || mistake.empty()) return;
  Sums& sum = (*sums)[name];
  const double base = name == "lse" && p_.options.lse_base2 ? 1 / kLn2 : 1.0;
  const Array4<double>& got = candidates_.at(name);
  const Array4<double>& answer = *MemberOf(answer_, name);
  const DType stored = p_.Output(name)->view.dtype;
  const auto columns = static_cast<size_t>(got.sizes[3]);
  int64_t at = 0;
  for (size_t i = 0; i < mistake.size(); ++i) {
    const size_t column = i % columns;
    if (column == 0) {
      int64_t h = head, row = begin + static_cast<int64_t>(i / columns);
      if (swapped) {
        std::tie(h, row) = SwappedRow(p_.options.layout == Layout::kBhsd,
                                      got.sizes[1], got.sizes[2], head, row);
      }
      at = got.offset(s.batch, h, row);
    }
    const size_t here = static_cast<size_t>(at) + column;
    if (lse != nullptr && std::isinf((*lse)[i / columns]) &&
        !std::isfinite(got.values[here])) {
      continue;
    }
    const double m = mistake[i] * base;
    sum.Add(got.values[here], m, answer.values[here] * base);
    if (twin == nullptr) continue;
    const double error = RoundStored(stored, (*twin)[i] * base) - m;
    if (std::isfinite(error)) sum.twin2 += error * error;
  }
}

template <class T>
Evidence::UnitResults Evidence::RunUnit(const Model& model,
                                        const Unit& unit) const {
  const Faults& f = model.faults;
  // Gradients go where the backward reads.
  Faults in_backward = f;
  in_backward.head_map_modulo &= f.in_backward;
  const std::vector<int64_t> mapped = QueryHeads(p_, in_backward, unit.kv_head);
  const std::vector<int64_t> own = QueryHeads(p_, Faults(), unit.kv_head);
  const auto in = [](const std::vector<int64_t>& list, int64_t h) {
    return std::count(list.begin(), list.end(), h) > 0;
  };
  std::set<int64_t> heads(mapped.begin(), mapped.end());
  heads.insert(own.begin(), own.end());
  const auto add = [](const std::vector<T>& from, std::vector<double>* to) {
    to->resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) (*to)[i] += from[i];
  };
  UnitResults r;
  int64_t member = 0;
  for (const int64_t h : heads) {
    const HeadResults<T> head =
        RunHead<T>(p_, model, model.given ? forward_ : nullptr, *unit.sequence,
                   h, KvHead(p_, f, h));
    if (in(own, h)) {
      r.heads.push_back(h);
      r.out.emplace_back(head.out.begin(), head.out.end());
      r.lse.push_back(head.stored_lse);
      r.dq.emplace_back(head.dq.begin(), head.dq.end());
    }
    if (!in(mapped, h)) continue;
    if (f.group_member < 0 || f.group_member == member) {
      add(head.dk, &r.dk);
      add(head.dv, &r.dv);
    }
    ++member;
  }
  return r;
}

Evidence::UnitResults Evidence::RunTwin(Model model, const Unit& unit) const {
  const Model twin = TwinModel(p_);
  model.products = twin.products;
  model.out = twin.out;
  model.f32_lse = twin.f32_lse;
  return p_.products == Products::kF64 ? RunUnit<double>(model, unit)
                                       : RunUnit<float>(model, unit);
}

void Evidence::AddRun(const Model& model, const Unit& unit, bool with_twin,
                      bool forward, bool gradients, TensorSums* sums) const {
  const UnitResults m = RunUnit<double>(model, unit);
  UnitResults t;
  if (with_twin) t = RunTwin(model, unit);
  const Sequence& s = *unit.sequence;
  for (size_t n = 0; n < m.heads.size(); ++n) {
    const auto compare = [&](const char* name,
                             const std::vector<std::vector<double>>& values,
                             const std::vector<std::vector<double>>& twin) {
      Compare(name, m.heads[n], s.q_begin, s, false, values[n],
              with_twin ? &twin[n] : nullptr, &m.lse[n], sums);
    };
    if (forward) compare("out", m.out, t.out);
    if (forward) compare("lse", m.lse, t.lse);
    if (gradients) compare("dq", m.dq, t.dq);
  }
  if (!gradients) return;
  const Faults& f = model.faults;
  Compare("dk", unit.kv_head, s.k_begin, s,
          f.kv_gradients_swapped && f.k_layout_swapped, m.dk,
          with_twin ? &t.dk : nullptr, nullptr, sums);
  Compare("dv", unit.kv_head, s.k_begin, s,
          f.kv_gradients_swapped && f.v_layout_swapped, m.dv,
          with_twin ? &t.dv : nullptr, nullptr, sums);
}

void Evidence::AddUnit(const Mistake& mistake, const Unit& unit, bool with_twin,
                       TensorSums* sums) const {
  Model model;
  model.faults = mistake.faults;
  if (forward_ == nullptr) {
    AddRun(model, unit, with_twin, true, true, sums);
    return;
  }
  if (mistake.faults.in_forward && forward_fails_) {
    model.gradients = false;
    AddRun(model, unit, with_twin, true, false, sums);
  }
  if (!mistake.faults.in_backward || mistake.same_given) return;
  model.gradients = true;
  model.given = true;
  AddRun(model, unit, with_twin, false, true, sums);
}

void Evidence::AddAuxiliary(const Mistake& mistake, TensorSums* sums) const {
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
    const std::vector<double>& values = MemberOf(m, name)->values;
    const std::vector<double>& twins = MemberOf(t, name)->values;
    Sums& sum = (*sums)[name];
    const DType stored = p_.Output(name)->view.dtype;
    for (size_t i = 0; i < values.size(); ++i) {
      sum.Add(candidates_.at(name).values[i], values[i],
              MemberOf(answer_, name)->values[i]);
      const double error = RoundStored(stored, twins[i]) - values[i];
      sum.twin2 += error * error;
    }
  }
}

}  // namespace fa2::verify
