// SPDX-License-Identifier: Apache-2.0

// A valid attention call of any options, forward and backward, on one thread of
// every target and engine: within its bounds of float64, no byte written
// outside; and on one of them with the same bits on more threads, of a pool
// that the bytes choose.
#include "tests/fuzz/fuzz.h"
#include "tests/support/attention_run.h"
#include "tests/support/case_generator.h"

namespace fa2::test {
namespace {

// Most cases cost what the calls themselves do; few reach whole blocks and many
// heads of them. The oracle's time grows with what a case may cost.
int64_t MostWork(bool large, bool rare) {
  if (large) return int64_t{1} << (rare ? 26 : 23);
  return int64_t{1} << (rare ? 21 : 19);
}

}  // namespace
}  // namespace fa2::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fa2::test;
  Random random(data, size);
  const uint64_t how = random.Bits();
  CaseOptions options;
  options.large = random.Chance(1.0 / 64.0);
  options.most_work = MostWork(options.large, (how >> 4) % 8 == 0);
  AttentionCase c = RandomCase(random, options);
  c.seed = random.Bits();
  const AttentionInputs inputs = MakeInputs(c);
  const ExpectedOutputs expected = ComputeExpected(c, inputs);

  const std::vector<ContextGroup>& groups = ContextGroups();
  // Waking and waiting for threads takes many times as long as a small call.
  const ContextGroup* const threaded =
      random.Chance(0.25) ? &groups[random.Bits() % groups.size()] : nullptr;
  for (const ContextGroup& group : groups) {
    if (!group.vectors && &group != threaded && !random.Chance(0.25)) continue;
    std::vector<fa2::Context*> contexts = {group.one};
    if (&group == threaded) {
      contexts.push_back(group.several[how % group.several.size()]);
    }
    for (const auto& failure : CheckAttention(c, inputs, expected, contexts)) {
      Fail(group.name + ": " + failure + "\n  in " + Describe(c));
    }
  }
  return 0;
}
