// SPDX-License-Identifier: Apache-2.0

// Random calls of the training kernels, with what they must give.
#ifndef FA2_TESTS_SUPPORT_OP_CASE_H_
#define FA2_TESTS_SUPPORT_OP_CASE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fa2/context.h"
#include "fa2/status.h"
#include "tests/support/tensor.h"

namespace fa2::test {

// An output, the value of each of its elements in f64, and how far it may be
// off before it is rounded to the output's type: a multiple of the rounding
// error of one operation times the size of the terms that are summed.
struct OpOutput {
  std::string name;
  Tensor actual;
  Tensor value;
  Tensor bound;
};

struct OpCase {
  std::string text;  // kernel, dtype, sizes, options
  std::vector<Tensor> inputs;
  std::vector<OpOutput> outputs;
  std::function<Status(Context*)> run;
};

// How many kernels there are.
inline constexpr int64_t kOps = 11;

// The same seed gives the same call; seed % kOps says of which kernel.
OpCase RandomOpCase(uint64_t seed);
// Of kernel `op` in [0, kOps), by these draws.
OpCase RandomOpCase(int64_t op, const Random& random);

// Runs the call on each context and lists what is wrong: a status, an element
// past its bound, a byte written outside of the outputs, an input changed, bits
// that differ between contexts. Outputs are then as they were before.
std::vector<std::string> CheckOp(const OpCase& c,
                                 const std::vector<Context*>& contexts);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_OP_CASE_H_
