// SPDX-License-Identifier: Apache-2.0

// Random cases of all options together against the float64 oracle.
// FA2_TEST_SEED=n runs case n alone.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/attention_run.h"
#include "tests/support/case_generator.h"

namespace fa2::test {
namespace {

void RunCases(uint64_t first_seed, uint64_t all_cases,
              const CaseOptions& options, const std::vector<int>& threads) {
  const Contexts contexts(threads);
  if (const char* seed = std::getenv("FA2_TEST_SEED")) {
    ExpectAttention(RandomCase(std::stoull(seed), options), contexts.list());
    return;
  }
  const uint64_t cases =
      all_cases * static_cast<uint64_t>(CasesOfSixteen()) / 16;
  // More failures than this say nothing new.
  constexpr int kShown = 10;
  int failed = 0;
  for (uint64_t n = 0; n < cases && failed < kShown; ++n) {
    const AttentionCase c = RandomCase(first_seed + n, options);
    const AttentionInputs inputs = MakeInputs(c);
    for (const auto& failure : CheckAttention(c, inputs, contexts.list())) {
      ADD_FAILURE() << failure << "\n  in " << Describe(c);
      ++failed;
    }
  }
}

// Dense calls: masks, windows, layouts, gradients.
TEST(AttentionRandom, Plain) {
  CaseOptions options;
  options.extras = false;
  RunCases(1000000, 2400, options, {1, 3});
}

// With bias, dropout, softcap, ALiBi, sinks, packed sequences and dlse.
TEST(AttentionRandom, AllOptions) {
  RunCases(2000000, 2400, CaseOptions(), {1, 3});
}

// Several blocks, which are cut by the number of threads: the same bits.
TEST(AttentionRandom, SeveralBlocks) {
  CaseOptions options;
  options.large = true;
  RunCases(3000000, 32, options, {1, 2, 5, 16});
}

// Many small heads, of which a thread takes one after another.
TEST(AttentionRandom, ShortHeads) {
  CaseOptions options;
  options.short_heads = true;
  RunCases(4000000, 400, options, {1, 2, 5, 16});
}

// Keys in parts that threads share out: the same bits.
TEST(AttentionRandom, FewQueries) {
  CaseOptions options;
  options.few_queries = true;
  RunCases(5000000, 480, options, {1, 2, 5, 16});
}

}  // namespace
}  // namespace fa2::test
