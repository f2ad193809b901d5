// SPDX-License-Identifier: Apache-2.0

// A valid call of a training kernel, held as attention_fuzz.cc holds attention.
#include "tests/fuzz/fuzz.h"
#include "tests/support/op_case.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fa2::test;
  Random random(data, size);
  const int64_t op = random.Integer(0, kOps - 1);
  const int64_t which = random.Integer(0, 2);
  const OpCase c = RandomOpCase(op, random);
  for (const ContextGroup& group : ContextGroups()) {
    for (const std::string& failure : CheckOp(c, group.Some(which, random))) {
      Fail(group.name + ": " + failure + "\n  in " + c.text);
    }
  }
  return 0;
}
