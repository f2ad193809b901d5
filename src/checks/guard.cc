// SPDX-License-Identifier: Apache-2.0
#include "src/checks/guard.h"

#include <exception>
#include <new>
#include <string>

namespace fa2::checks {
namespace {

// A sentence needs memory of its own, which there may be none of. Short words
// are kept inside std::string: 15 bytes with libstdc++, 22 with libc++.
Status WithSentence(StatusCode code, const char* sentence,
                    const char* words) noexcept {
  try {
    return Status(code, sentence);
  } catch (...) {
    return Status(code, words);
  }
}

}  // namespace

Status StatusOfException() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return WithSentence(StatusCode::kOutOfMemory,
                        "the call ran out of memory; the system has none left",
                        "out of memory");
  } catch (const std::exception& error) {
    return WithSentence(StatusCode::kInternal, error.what(), "exception");
  } catch (...) {
    return WithSentence(StatusCode::kInternal, "an exception of unknown type",
                        "exception");
  }
}

}  // namespace fa2::checks
