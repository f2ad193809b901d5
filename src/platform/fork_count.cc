// SPDX-License-Identifier: Apache-2.0
#include "src/platform/fork_count.h"

#if defined(__unix__) || defined(__APPLE__)

#include <pthread.h>

#include <atomic>

namespace fa2::platform {
namespace {

std::atomic<int> g_forks{0};

}  // namespace

int ForkCount() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1); });
  (void)registered;
  return g_forks.load();
}

}  // namespace fa2::platform

#else

namespace fa2::platform {

int ForkCount() { return 0; }

}  // namespace fa2::platform

#endif
