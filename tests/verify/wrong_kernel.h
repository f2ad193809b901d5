// SPDX-License-Identifier: Apache-2.0

// An attention kernel with a mistake in it, as one would be written: plain
// loops over tiles, products rounded to the case's precision.
#ifndef FA2_TESTS_VERIFY_WRONG_KERNEL_H_
#define FA2_TESTS_VERIFY_WRONG_KERNEL_H_

#include <string>

#include "src/verify/cases/case.h"

namespace fa2::verify::test {

// Keys and queries of a tile.
inline constexpr int64_t kTile = 32;

// Adds out, lse, dq, dk, dv (and dbias, dsinks where the case has bias and
// sinks) to the case. `fault` is "" for an honest kernel, a mistake's id, or
// an id with a variant behind a colon ("causal_off_by_one:short").
void RunWrongKernel(const std::string& fault, Case* c);

}  // namespace fa2::verify::test

#endif  // FA2_TESTS_VERIFY_WRONG_KERNEL_H_
