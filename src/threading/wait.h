// SPDX-License-Identifier: Apache-2.0
#ifndef FA2_SRC_THREADING_WAIT_H_
#define FA2_SRC_THREADING_WAIT_H_

#include <thread>

namespace fa2::threading {

// Waits a little longer each time: some 10 us at full attention, then leaving
// the core to whoever wants it.
class Wait {
 public:
  void operator()() {
    constexpr int kPauses = 200;
    if (count_ < kPauses) {
      ++count_;
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    } else {
      std::this_thread::yield();
    }
  }

 private:
  int count_ = 0;
};

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_WAIT_H_
