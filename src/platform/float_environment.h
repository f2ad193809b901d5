// SPDX-License-Identifier: Apache-2.0

// The CPU's floating-point settings of a thread: rounding mode, whether
// subnormal numbers are flushed to zero, which exceptions trap.
#ifndef FA2_SRC_PLATFORM_FLOAT_ENVIRONMENT_H_
#define FA2_SRC_PLATFORM_FLOAT_ENVIRONMENT_H_

#include <cstdint>

#if !defined(__SSE2__) && !defined(__aarch64__)
#include <cfenv>
#endif

namespace fa2::platform {

// While it lives, its thread rounds to nearest, keeps subnormal numbers and
// traps on nothing. Then the thread has again what it had, flags of exceptions
// included. Results so do not depend on what a program or its pool has set:
// -ffast-math alone makes a program flush subnormals. Registers are written
// only where they hold something else, as that is what takes time (10 ns).
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment();
  ~DefaultFloatEnvironment();
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__SSE2__)
  uint32_t mxcsr_;  // of vector instructions
  uint16_t x87_;    // the control word of long double and of old code
#elif defined(__aarch64__)
  uint64_t fpcr_;  // settings
  uint64_t fpsr_;  // flags
#else
  std::fenv_t environment_;
#endif
};

}  // namespace fa2::platform

#endif  // FA2_SRC_PLATFORM_FLOAT_ENVIRONMENT_H_
