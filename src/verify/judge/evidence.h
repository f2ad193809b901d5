// SPDX-License-Identifier: Apache-2.0

// What a mistake would give, held against what the candidate gave.
#ifndef FA2_SRC_VERIFY_JUDGE_EVIDENCE_H_
#define FA2_SRC_VERIFY_JUDGE_EVIDENCE_H_

#include <map>
#include <set>
#include <string>
#include <vector>

#include "src/verify/judge/mistakes.h"
#include "src/verify/judge/units.h"
#include "src/verify/model/answer.h"

namespace fa2::verify {

// Squared errors of a tensor over some units.
struct Sums {
  double to_mistake2 = 0.0;  // candidate - mistake
  double to_answer2 = 0.0;   // candidate - answer
  double mistake2 = 0.0;
  double twin2 = 0.0;    // mistake's twin - mistake
  double change2 = 0.0;  // mistake - answer
  bool finite = true;

  void Add(double got, double mistake, double answer);
};

using TensorSums = std::map<std::string, Sums>;

class Evidence {
 public:
  // `forward`: the candidate's out and lse, or nullptr. `ignored`: tensors that
  // are not looked at. `forward_fails`: whether out or lse is to be explained.
  Evidence(const Problem& problem, const Forward* forward, const Answer& answer,
           const std::map<std::string, Array4<double>>& candidates,
           const std::set<std::string>& ignored, bool forward_fails)
      : p_(problem),
        forward_(forward),
        answer_(answer),
        candidates_(candidates),
        ignored_(ignored),
        forward_fails_(forward_fails) {}

  // Adds what the mistake does to out, lse, dq, dk and dv of one unit.
  void AddUnit(const Mistake& mistake, const Unit& unit, bool with_twin,
               TensorSums* sums) const;
  // The same of gradients that are summed over heads or batches: it runs all of
  // the case.
  void AddAuxiliary(const Mistake& mistake, TensorSums* sums) const;

 private:
  struct UnitResults;

  bool Wanted(const std::string& name) const;
  void Compare(const std::string& name, int64_t head, int64_t begin,
               const Sequence& s, bool swapped,
               const std::vector<double>& mistake,
               const std::vector<double>* twin, const std::vector<double>* lse,
               TensorSums* sums) const;
  template <class T>
  UnitResults RunUnit(const Model& model, const Unit& unit) const;
  UnitResults RunTwin(Model model, const Unit& unit) const;
  void AddRun(const Model& model, const Unit& unit, bool with_twin,
              bool forward, bool gradients, TensorSums* sums) const;

  const Problem& p_;
  const Forward* forward_;
  const Answer& answer_;
  const std::map<std::string, Array4<double>>& candidates_;
  const std::set<std::string>& ignored_;
  bool forward_fails_;
};

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_EVIDENCE_H_
