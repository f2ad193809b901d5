// SPDX-License-Identifier: Apache-2.0

// A case run through fa2 and checked.
#ifndef FA2_TESTS_SUPPORT_ATTENTION_RUN_H_
#define FA2_TESTS_SUPPORT_ATTENTION_RUN_H_

#include <memory>
#include <string>
#include <vector>

#include "fa2/context.h"
#include "tests/support/attention_case.h"
#include "tests/support/attention_check.h"

namespace fa2::test {

// Runs forward and backward on each context (nullptr: the default one) and
// lists what is wrong: a status, an output past its bound, a byte written
// outside of the outputs, an input changed, bits that differ between contexts.
// Inputs remember their contents meanwhile, so they are one caller's at a time.
std::vector<std::string> CheckAttention(const AttentionCase& c,
                                        const AttentionInputs& inputs,
                                        const ExpectedOutputs& expected,
                                        const std::vector<Context*>& contexts);
std::vector<std::string> CheckAttention(const AttentionCase& c,
                                        const AttentionInputs& inputs,
                                        const std::vector<Context*>& contexts);
std::vector<std::string> CheckAttention(const AttentionCase& c,
                                        const std::vector<Context*>& contexts);

// Fails the running test for each thing that is wrong, with the case in words.
void ExpectAttention(const AttentionCase& c,
                     const std::vector<Context*>& contexts);
void ExpectAttention(const AttentionCase& c, const AttentionInputs& inputs,
                     const std::vector<Context*>& contexts);

// Contexts of these numbers of threads, with targets and engine of the
// environment, and workspace that begins as NaN.
class Contexts {
 public:
  explicit Contexts(const std::vector<int>& threads);
  const std::vector<Context*>& list() const { return list_; }

 private:
  std::vector<std::unique_ptr<Context>> owned_;
  std::vector<Context*> list_;
};

// How many cases out of 16 a suite runs: all of them, fewer where the
// environment caps the target or takes another engine than the best, since only
// the kernels differ then, or asks for few (FA2_TEST_FEW_CASES), and fewest
// without vectors.
int CasesOfSixteen();

// Two query heads over one kv head, and sizes that are multiples of no tile;
// fewer queries where fewer cases are run.
AttentionCase GroupedCase(DType dtype, int64_t head_dim);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_ATTENTION_RUN_H_
