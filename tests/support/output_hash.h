// SPDX-License-Identifier: Apache-2.0

// The bits of a call's results as one number.
#ifndef FA2_TESTS_SUPPORT_OUTPUT_HASH_H_
#define FA2_TESTS_SUPPORT_OUTPUT_HASH_H_

#include <cstdint>

#include "tests/support/attention_case.h"

namespace fa2::test {

// Over every element of every output, but for the padding of a padded lse,
// which is left as it was; all NaNs are one value.
uint64_t HashOf(const AttentionCase& c, const AttentionOutputs& outputs);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_OUTPUT_HASH_H_
