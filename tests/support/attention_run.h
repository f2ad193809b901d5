// A case run through fa2 and checked.
#ifndef FA2_TESTS_SUPPORT_ATTENTION_RUN_H_
#define FA2_TESTS_SUPPORT_ATTENTION_RUN_H_

#include <string>
#include <vector>

#include "fa2/context.h"
#include "tests/support/attention_case.h"

namespace fa2::test {

// Runs forward and backward on each context (nullptr: the default one) and
// lists what is wrong: a status, an output past its bound, a byte written
// outside of the outputs, an input changed, bits that differ between contexts.
std::vector<std::string> CheckAttention(const AttentionCase& c,
                                        const std::vector<Context*>& contexts);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_ATTENTION_RUN_H_
