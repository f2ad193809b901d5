// SPDX-License-Identifier: Apache-2.0
#include "src/platform/fork_count.h"

#if defined(__unix__) || defined(__APPLE__)

#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstring>

namespace fa2::platform {
namespace {

std::atomic<int> g_forks{0};

// Linux tells in /proc: the ninth value is the task's flags (proc(5)), of which
// PF_FORKNOEXEC (include/linux/sched.h) is kept until the next exec.
bool ForkedBeforeLoading() {
  FILE* const file = std::fopen("/proc/self/stat", "re");
  if (file == nullptr) return false;
  char text[512];
  const size_t length = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[length] = '\0';
  // The second value is the program's name in brackets, of any characters.
  const char* const name_end = std::strrchr(text, ')');
  unsigned flags = 0;
  if (name_end == nullptr ||
      std::sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1) {
    return false;
  }
  constexpr unsigned kForkedWithoutExec = 0x40;
  return (flags & kForkedWithoutExec) != 0;
}

int Register() {
  if (ForkedBeforeLoading()) g_forks.store(1);
  return pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1); });
}

// When the library is loaded: forks before its first call count.
const int g_registered = Register();

}  // namespace

int ForkCount() {
  (void)g_registered;
  return g_forks.load();
}

}  // namespace fa2::platform

#else

namespace fa2::platform {

int ForkCount() { return 0; }

}  // namespace fa2::platform

#endif
