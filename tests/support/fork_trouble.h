// SPDX-License-Identifier: Apache-2.0

// What keeps a test from forking.
#ifndef FA2_TESTS_SUPPORT_FORK_TROUBLE_H_
#define FA2_TESTS_SUPPORT_FORK_TROUBLE_H_

#include <cstdlib>

namespace fa2::test {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
inline constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#else
inline constexpr bool kAddressSanitizer = false;
#endif

// AddressSanitizer takes its allocator's locks before a fork since LLVM 18
// (pull request 75290). Without that, and GCC 12 is without, a child waits for
// ever for one that another thread held.
#if defined(__clang__)
inline constexpr bool kSanitizerForks = __clang_major__ >= 18;
#else
inline constexpr bool kSanitizerForks = false;
#endif

// Null where a test may fork a child that starts threads.
inline const char* ForkTrouble() {
  // scripts/qemu.sh.
  return std::getenv("FA2_UNDER_QEMU") == nullptr
             ? nullptr
             : "an assertion of qemu 7.2 fails (plugins/core.c)";
}

// The same with other threads in the parent.
inline const char* ForkTroubleBesideThreads() {
  if (kAddressSanitizer && !kSanitizerForks) {
    return "a thread may hold a lock of AddressSanitizer's allocator";
  }
  return ForkTrouble();
}

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_FORK_TROUBLE_H_
