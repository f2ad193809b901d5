// SPDX-License-Identifier: Apache-2.0

// How far one tensor is from another.
#ifndef FA2_TESTS_SUPPORT_ERROR_H_
#define FA2_TESTS_SUPPORT_ERROR_H_

#include "fa2/types.h"
#include "tests/support/tensor.h"

namespace fa2::test {

struct Error {
  double l2 = 0.0;  // of actual - expected
  double expected_l2 = 0.0;
  double max_abs = 0.0;        // greatest |actual - expected|
  Sizes worst = {0, 0, 0, 0};  // its index

  // l2 / expected_l2; where expected is all zeros, 0 for zeros, else infinity.
  double relative_l2() const;
};

// Elements that are equal (infinities too) or both NaN do not differ; any other
// pair with a NaN or infinity in it makes the norms infinite.
Error ErrorOf(const ConstTensorView& actual, const ConstTensorView& expected);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_ERROR_H_
