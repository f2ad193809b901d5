// SPDX-License-Identifier: Apache-2.0

// The bits of a call's results as one number.
#ifndef FA2_TESTS_SUPPORT_OUTPUT_HASH_H_
#define FA2_TESTS_SUPPORT_OUTPUT_HASH_H_

#include <cstdint>

#include "fa2/context.h"
#include "fa2/status.h"
#include "tests/support/attention_case.h"

namespace fa2::test {

// Runs forward and backward. `hash` is over every element of every output, but
// for the padding of a padded lse, which is left as it was; all NaNs are one
// value. It is 0 where a call fails.
Status HashOfCall(const AttentionCase& c, const AttentionInputs& inputs,
                  Context* context, uint64_t* hash);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_OUTPUT_HASH_H_
