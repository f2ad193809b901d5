// SPDX-License-Identifier: Apache-2.0

// FA2_EXPORT marks the symbols that the shared library shows; all others are
// hidden.
#ifndef FA2_EXPORT_H_
#define FA2_EXPORT_H_

#if defined(__GNUC__) || defined(__clang__)
#define FA2_EXPORT __attribute__((visibility("default")))
#else
#define FA2_EXPORT
#endif

#endif  // FA2_EXPORT_H_
