// SPDX-License-Identifier: Apache-2.0
#include "tests/threading/limited_threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>

namespace {

constexpr int kNoLimit = 1 << 20;
std::atomic<int> g_limit{kNoLimit};
std::atomic<int> g_running{0};
std::atomic<int> g_refused{0};

struct Start {
  void* (*routine)(void*);
  void* argument;
};

void* Routine(void* s) {
  const Start start = *static_cast<Start*>(s);
  delete static_cast<Start*>(s);
  void* const result = start.routine(start.argument);
  g_running.fetch_sub(1);
  return result;
}

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attr,
                              void* (*routine)(void*), void* argument) {
  using Create =
      int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create =
      reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (g_running.fetch_add(1) >= g_limit.load()) {
    g_running.fetch_sub(1);
    g_refused.fetch_add(1);
    return EAGAIN;
  }
  auto* const start = new Start{routine, argument};
  const int error = create(thread, attr, Routine, start);
  if (error != 0) {
    delete start;
    g_running.fetch_sub(1);
  }
  return error;
}

namespace fa2::test {

void LimitThreads(int limit) {
  g_refused.store(0);
  g_limit.store(limit);
}

void LimitThreadsNoMore() { g_limit.store(kNoLimit); }

int RunningThreads() { return g_running.load(); }

int RefusedThreads() { return g_refused.load(); }

}  // namespace fa2::test
