// SPDX-License-Identifier: Apache-2.0

/* The version of these headers, and of the library that is linked. C and C++.
 *
 * Versions are MAJOR.MINOR.PATCH; before 1.0 a minor version may change the
 * interface. */
#ifndef FA2_VERSION_H_
#define FA2_VERSION_H_

#include "fa2/export.h"

/* Of the headers. cmake/ and the Python package take theirs from
 * CMakeLists.txt; tests/version_test.cc compares the two. */
#define FA2_VERSION_MAJOR 0
#define FA2_VERSION_MINOR 1
#define FA2_VERSION_PATCH 0
#define FA2_VERSION_STRING "0.1.0"

#ifdef __cplusplus
namespace fa2 {

// "MAJOR.MINOR.PATCH" of the library, which FA2_VERSION_STRING was when it was
// built. fa2_c.h has the same for C: fa2_version_string.
FA2_EXPORT const char* Version() noexcept;

}  // namespace fa2
#endif

#endif /* FA2_VERSION_H_ */
