// SPDX-License-Identifier: Apache-2.0

// A test that hangs ends its process.
#ifndef FA2_TESTS_SUPPORT_HANG_ALARM_H_
#define FA2_TESTS_SUPPORT_HANG_ALARM_H_

#include <unistd.h>

#include <cstdlib>

namespace fa2::test {

// From now on, unless alarm(0) follows: five minutes, under qemu on a busy
// machine half an hour.
inline void SetHangAlarm() {
  alarm(std::getenv("FA2_UNDER_QEMU") != nullptr ? 1800 : 300);
}

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_HANG_ALARM_H_
