// SPDX-License-Identifier: Apache-2.0
#include "tests/soak/load.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

namespace fa2::test {
namespace {

[[noreturn]] void WorkAndSleep(int core) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  (void)sched_setaffinity(0, sizeof(set), &set);
  using Clock = std::chrono::steady_clock;
  // From a fraction of a time slice to several.
  for (unsigned turn = static_cast<unsigned>(core);; ++turn) {
    const auto end =
        Clock::now() + std::chrono::microseconds(200 << (turn % 7));
    while (Clock::now() < end) {
    }
    usleep(500u << (turn % 5));
  }
}

}  // namespace

Load::Load() {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  if (sched_getaffinity(0, sizeof(mine), &mine) != 0) return;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &mine)) continue;
    const pid_t child = fork();
    if (child == 0) WorkAndSleep(core);
    if (child > 0) children_.push_back(child);
  }
}

Load::~Load() {
  for (const pid_t child : children_) kill(child, SIGKILL);
  for (const pid_t child : children_) waitpid(child, nullptr, 0);
}

}  // namespace fa2::test
