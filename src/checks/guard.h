// SPDX-License-Identifier: Apache-2.0

// The one place where exceptions of the library's own code become statuses.
#ifndef FA2_SRC_CHECKS_GUARD_H_
#define FA2_SRC_CHECKS_GUARD_H_

#include "fa2/status.h"

namespace fa2::checks {

// Inside a catch block: the exception being handled as a status. Memory having
// run out, the sentence is one that fits into the status itself.
Status StatusOfException() noexcept;

// Runs the body of a public function, a callable that returns Status. Whatever
// the body throws, std::bad_alloc first of all, comes out as a status.
template <class Body>
Status Guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (...) {
    return StatusOfException();
  }
}

}  // namespace fa2::checks

#endif  // FA2_SRC_CHECKS_GUARD_H_
