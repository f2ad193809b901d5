// SPDX-License-Identifier: Apache-2.0
#include "src/platform/float_environment.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace fa2::platform {

#if defined(__SSE2__)

// As processes start (System V ABI, AMD64 supplement, 3.2.3).
namespace {

constexpr uint32_t kMxcsr = 0x1F80;
constexpr uint32_t kMxcsrFlags = 0x3F;
constexpr uint16_t kX87 = 0x037F;

uint16_t X87ControlWord() {
  uint16_t word;
  __asm__ volatile("fnstcw %0" : "=m"(word));
  return word;
}

void SetX87ControlWord(uint16_t word) {
  __asm__ volatile("fldcw %0" : : "m"(word));
}

}  // namespace

DefaultFloatEnvironment::DefaultFloatEnvironment()
    : mxcsr_(_mm_getcsr()), x87_(X87ControlWord()) {
  if ((mxcsr_ & ~kMxcsrFlags) != kMxcsr) _mm_setcsr(kMxcsr);
  if (x87_ != kX87) SetX87ControlWord(kX87);
}

DefaultFloatEnvironment::~DefaultFloatEnvironment() {
  if (_mm_getcsr() != mxcsr_) _mm_setcsr(mxcsr_);
  if (x87_ != kX87) SetX87ControlWord(x87_);
}

#elif defined(__aarch64__)

// FPCR of 0 is the default (AAPCS64, 6.1.2).
namespace {

uint64_t Fpcr() {
  uint64_t value;
  __asm__ volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}

uint64_t Fpsr() {
  uint64_t value;
  __asm__ volatile("mrs %0, fpsr" : "=r"(value));
  return value;
}

void SetFpcr(uint64_t value) {
  __asm__ volatile("msr fpcr, %0" : : "r"(value));
}

void SetFpsr(uint64_t value) {
  __asm__ volatile("msr fpsr, %0" : : "r"(value));
}

}  // namespace

DefaultFloatEnvironment::DefaultFloatEnvironment()
    : fpcr_(Fpcr()), fpsr_(Fpsr()) {
  if (fpcr_ != 0) SetFpcr(0);
}

DefaultFloatEnvironment::~DefaultFloatEnvironment() {
  if (fpcr_ != 0) SetFpcr(fpcr_);
  if (Fpsr() != fpsr_) SetFpsr(fpsr_);
}

#else

DefaultFloatEnvironment::DefaultFloatEnvironment() {
  (void)std::fegetenv(&environment_);
  (void)std::fesetenv(FE_DFL_ENV);
}

DefaultFloatEnvironment::~DefaultFloatEnvironment() {
  (void)std::fesetenv(&environment_);
}

#endif

}  // namespace fa2::platform
