// SPDX-License-Identifier: Apache-2.0
#include "tests/support/error.h"

#include <cmath>
#include <limits>

namespace fa2::test {

double Error::relative_l2() const {
  if (l2 == 0.0) return 0.0;
  if (expected_l2 == 0.0) return std::numeric_limits<double>::infinity();
  return l2 / expected_l2;
}

Error ErrorOf(const ConstTensorView& actual, const ConstTensorView& expected) {
  Error error;
  double difference_squared = 0.0;
  double expected_squared = 0.0;
  ForEachIndex(expected.sizes, [&](const Sizes& index) {
    const double a = Get(actual, index);
    const double e = Get(expected, index);
    if (std::isfinite(e)) expected_squared += e * e;
    if (a == e || (std::isnan(a) && std::isnan(e))) return;
    double difference = std::abs(a - e);
    if (!std::isfinite(difference)) {
      difference = std::numeric_limits<double>::infinity();
    }
    difference_squared += difference * difference;
    if (difference > error.max_abs) {
      error.max_abs = difference;
      error.worst = index;
    }
  });
  error.l2 = std::sqrt(difference_squared);
  error.expected_l2 = std::sqrt(expected_squared);
  return error;
}

}  // namespace fa2::test
