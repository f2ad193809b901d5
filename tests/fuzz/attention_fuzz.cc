// SPDX-License-Identifier: Apache-2.0

// A valid attention call of any options, forward and backward, on every target
// and engine: within its bounds of float64, with the same bits on all pools and
// numbers of threads, and no byte written outside.
#include "tests/fuzz/fuzz.h"
#include "tests/support/attention_run.h"
#include "tests/support/case_generator.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fa2::test;
  Random random(data, size);
  CaseOptions options;
  const int64_t which = random.Integer(0, 2);
  options.large = random.Chance(1.0 / 256.0);
  AttentionCase c = RandomCase(random, options);
  c.seed = random.Bits();
  const AttentionInputs inputs = MakeInputs(c);
  for (const ContextGroup& group : ContextGroups()) {
    if (!group.vectors && !random.Chance(0.25)) continue;
    for (const auto& failure :
         CheckAttention(c, inputs, group.Some(which, random))) {
      Fail(group.name + ": " + failure + "\n  in " + Describe(c));
    }
  }
  return 0;
}
