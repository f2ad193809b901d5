// SPDX-License-Identifier: Apache-2.0

// Prints one line for each of a fixed list of attention calls: what the call
// is, and a hash of all that it wrote. Two builds compute the same bits where
// their lists are equal: see scripts/bits_compare.sh.
//   print_hashes [FIRST_SEED CASES]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"
#include "tests/support/case_generator.h"
#include "tests/support/output_hash.h"

namespace fa2::test {
namespace {

void Print(const char* kind, const AttentionCase& c,
           const std::vector<Context*>& contexts) {
  const AttentionInputs inputs = MakeInputs(c);
  for (Context* context : contexts) {
    std::string line = std::string(kind) + " " + std::to_string(c.seed) + " ";
    uint64_t hash;
    const Status status = HashOfCall(c, inputs, context, &hash);
    char text[32];
    snprintf(text, sizeof(text), "%016llx",
             static_cast<unsigned long long>(hash));
    line += status.ok() ? text : status.message();
    printf("%s %s\n", line.c_str(), Describe(c).c_str());
  }
}

// Groups of many heads, sums of dbias over heads and batch elements, and
// lengths that go by queries or in parts.
AttentionCase WideCase(uint64_t seed) {
  Random r(seed);
  AttentionCase c = RandomCase(seed, {true, true, true});
  c.heads = c.kv_heads * r.Pick<int64_t>({4, 8, 8});
  return c;
}

}  // namespace
}  // namespace fa2::test

int main(int argc, char** argv) {
  using namespace fa2::test;
  const uint64_t first = argc > 2 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const uint64_t cases = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 600;
  const Contexts one({1}), several({1, 3});
  for (uint64_t n = first; n < first + cases; ++n) {
    Print("small", RandomCase(n, CaseOptions()), one.list());
    if (n % 8 == 0) {
      Print("large", RandomCase(n, {true, true, true}), several.list());
    }
    if (n % 16 == 0) Print("wide", WideCase(n), several.list());
  }
  return 0;
}
