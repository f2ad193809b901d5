// SPDX-License-Identifier: Apache-2.0

// Whether a call of fa2 gives what the float64 oracle gives, within bounds that
// follow from how the call rounds.
//
// Each output has a magnitude beside its value: the root of the sum of the
// squares of the terms that were added to make it, each weighted with how far
// the error of its score is amplified by exp. It is what independent rounding
// errors of relative size 1 would leave, so it stays where the value itself
// cancels (dS of a row that sees one key is 0 = P * (dP - delta)). Magnitudes
// are kept per row, [B, H, N, 1]; those of dbias per element. Where rows of
// dout are one row in memory, their errors are not independent: what sums over
// them (dv, dbias, dalibi, dsinks) has the sum of the terms' sizes, and nothing
// averages out in the mean error of a gradient.
#ifndef FA2_TESTS_SUPPORT_ATTENTION_CHECK_H_
#define FA2_TESTS_SUPPORT_ATTENTION_CHECK_H_

#include <string>
#include <vector>

#include "tests/support/attention_case.h"
#include "tests/support/tensor.h"

namespace fa2::test {

// Relative L2 error that the classes of fa2::Precision allow.
struct Precisions {
  double sums;    // of results kept in f32 (f64 for f64)
  double stored;  // as sums, and rounded to the inputs' 16-bit type; else 0
  double lse;     // absolute, beside what the scores' own size costs
};
Precisions PrecisionsOf(const AttentionCase& c);

// A result in f64 and its magnitude, one value a row or an element.
struct Expected {
  Tensor value;
  Tensor magnitude;
  bool one_error = false;  // errors of rows may be the same one
};

struct ExpectedOutputs {
  Expected out, lse, dq, dk, dv, dbias, dalibi, dsinks;
  // Mean over rows of the scores' amplification, weighted by P.
  double amplification = 1.0;
};

// All outputs, wanted or not, before accumulation.
ExpectedOutputs ComputeExpected(const AttentionCase& c,
                                const AttentionInputs& inputs);

// What is wrong with one output: empty if nothing is, else a sentence with the
// error, its bound and the worst element. `before` is what an accumulated
// output held, else not given. `factor`: what P of a term is multiplied with,
// at most, beside numbers around 1.
std::string Compare(const AttentionCase& c, const std::string& name,
                    const ConstTensorView& actual, const Expected& expected,
                    double amplification, const ConstTensorView& before = {},
                    double factor = 1.0);

// Of the outputs that are given.
std::vector<std::string> CompareForward(const AttentionCase& c,
                                        const AttentionOutputs& actual,
                                        const ExpectedOutputs& expected);
std::vector<std::string> CompareBackward(const AttentionCase& c,
                                         const AttentionOutputs& actual,
                                         const ExpectedOutputs& expected,
                                         const AttentionOutputs& before);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_ATTENTION_CHECK_H_
