// SPDX-License-Identifier: Apache-2.0

// Random attention cases over all options.
#ifndef FA2_TESTS_SUPPORT_CASE_GENERATOR_H_
#define FA2_TESTS_SUPPORT_CASE_GENERATOR_H_

#include <cstdint>
#include <optional>

#include "tests/support/attention_case.h"
#include "tests/support/random.h"

namespace fa2::test {

// Which options a random case may draw.
struct CaseOptions {
  bool extras = true;  // bias, dropout, softcap, ALiBi, sinks, varlen, dlse
  bool f64 = true;
  // Hundreds of queries and keys, in several blocks, instead of a few tens, of
  // which thousands run in a minute.
  bool large = false;
  // Short sequences of many heads, as windows of an image and rows of a table
  // have them: most are one block, and padding is a large part of it.
  bool short_heads = false;
  // At most 24 queries against up to some thousand keys: what decoding and
  // cross attention to latents have.
  bool few_queries = false;
  // What the case may cost at most, in scores times (head dim + value dim + 64,
  // about what a score itself costs the oracle): sequences or batch elements,
  // heads and rows are taken away until it does.
  std::optional<int64_t> most_work = std::nullopt;
};

// The same seed gives the same case.
AttentionCase RandomCase(uint64_t seed, const CaseOptions& options);
// All but the seed of its data, by these draws.
AttentionCase RandomCase(Random& random, const CaseOptions& options);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_CASE_GENERATOR_H_
