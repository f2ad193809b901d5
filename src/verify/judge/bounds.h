// SPDX-License-Identifier: Apache-2.0

// How far a tensor of an honest kernel may be from the answer.
#ifndef FA2_SRC_VERIFY_JUDGE_BOUNDS_H_
#define FA2_SRC_VERIFY_JUDGE_BOUNDS_H_

#include <cstdint>
#include <string>

#include "src/verify/model/problem.h"
#include "src/verify/model/rounding.h"

namespace fa2::verify {

// How often the twin's own error a candidate may err, in relative L2: kernels
// of one precision sum in other orders and round P before or after it is
// divided by its sum. 16-bit products: their errors are many independent
// roundings, which add up alike. f32 and f64: errors of summation, which differ
// by what vectors, blocks and fused multiply-adds do. TF32 may be cut off
// rather than rounded, which errs twice as far.
double TwinMultiple(Products products);

// Squared errors of some rows of one head, and what relative errors of 1 of
// their roundings would make error2 on average.
struct SliceError {
  double error2 = 0.0;
  double expected2 = 0.0;
  double twin2 = 0.0;
  double size2 = 0.0;
  // Eigenvalues of that error's covariance, bounded: the largest of one row,
  // the sum of the squares of all rows', and of what rows share.
  double row_largest2 = 0.0;
  double rows4 = 0.0;
  double shared4 = 0.0;
  double allowed = 0.0;  // of the square root of error2
  int64_t rows = 0;
  int64_t bad = 0;  // elements that are finite in one alone
  double relative() const;
};

// An element: the answer, what the twin errs there, and what relative errors of
// 1 of its roundings would leave (-1: not known).
struct ElementSize {
  double expected = 0.0;
  double twin_error = 0.0;
  double size = -1.0;
  double row_largest = 0.0;  // of the row, what the largest rounding leaves
};

class Bounds {
 public:
  // `rms`: the answer's root mean square.
  Bounds(const Problem& problem, const std::string& name, DType stored,
         double rms, int64_t elements);

  double OfElement(const ElementSize& element) const;
  // A whole tensor, where the errors of `rows_that_count` rows average out.
  double OfTensor(const SliceError& total, double rows_that_count) const;
  // One of so many tiles.
  double OfTile(const SliceError& tile, int64_t tiles) const;
  // Rounding alone, of a result that is 0 without it.
  double OfZero(const SliceError& total) const;

 private:
  double Of(const SliceError& slice, double rows_that_count, double slack,
            int64_t judged) const;

  DType stored_;
  bool is_lse_;
  // Relative errors: of one rounding to 16 bits or as the result is stored, of
  // one f32 (f64) addition, and of one element's sum.
  double unit_, sum_unit_, element_unit_;
  double multiple_;
  double negligible_;
  double element_deviations_;
  double exp_error_;  // of lse, by exponentials that are not exact
};

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_BOUNDS_H_
