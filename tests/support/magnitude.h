// SPDX-License-Identifier: Apache-2.0

// Magnitudes of attention's results (see attention_check.h), from the scores
// and the lengths of the rows.
#ifndef FA2_TESTS_SUPPORT_MAGNITUDE_H_
#define FA2_TESTS_SUPPORT_MAGNITUDE_H_

#include "tests/support/attention_case.h"
#include "tests/support/attention_check.h"

namespace fa2::test {

// Fills the magnitude of every member and the amplification; `values` are set.
// `score_error` is the error of a score of size 1 as a multiple of the relative
// error that results may have.
void ComputeMagnitudes(const AttentionCase& c, const AttentionInputs& inputs,
                       double score_error, ExpectedOutputs* expected);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_MAGNITUDE_H_
