// SPDX-License-Identifier: Apache-2.0

// A case judged: each tensor, what was not there, and what is wrong.
#ifndef FA2_SRC_VERIFY_JUDGE_CHECK_H_
#define FA2_SRC_VERIFY_JUDGE_CHECK_H_

#include <functional>
#include <string>
#include <vector>

#include "src/verify/cases/case.h"
#include "src/verify/judge/verdict.h"

namespace fa2::verify {

struct Diagnosis {
  std::string id;
  std::string sentence;  // what it is and where to look
  std::vector<std::string> tensors;
};

struct CaseReport {
  std::string name;
  bool pass = true;
  std::string what;    // the case in a few words
  std::string method;  // how the answer was computed
  Products products = Products::kF32;
  // What the candidate multiplied and rounded before the scores; often nothing.
  std::string style;
  std::vector<TensorVerdict> tensors;
  std::vector<std::string> unchecked;
  std::vector<std::string> unread;  // the file's tensors of unknown names
  std::vector<Diagnosis> diagnosis;
  std::vector<std::string> moved;  // sentences on runs that differ
};

struct CheckOptions {
  bool plain = false;  // plain loops instead of fa2's f64 kernels
  bool diagnose = true;
  int threads = 0;  // 0: all cores
  // Called with what is being done; may be empty.
  std::function<void(const std::string&)> progress;
};

// Throws Error for a case that cannot be judged.
CaseReport Check(const Case& c, const CheckOptions& options);

// Compares the outputs of two runs of one case bit by bit.
void CompareRuns(const Case& first, const Case& other,
                 const std::string& other_name, CaseReport* report);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_CHECK_H_
