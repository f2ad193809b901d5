// SPDX-License-Identifier: Apache-2.0

// What the checker cannot work with: a file that is unreadable, a tensor or an
// option that does not fit. The command exits with 2 on it.
#ifndef FA2_SRC_VERIFY_CASES_ERROR_H_
#define FA2_SRC_VERIFY_CASES_ERROR_H_

#include <stdexcept>
#include <string>

namespace fa2::verify {

// One sentence that names the file, tensor or option.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_CASES_ERROR_H_
