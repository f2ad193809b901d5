// SPDX-License-Identifier: Apache-2.0
#include "src/platform/fork_mutex.h"

#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace fa2::platform {
namespace {

std::mutex g_list_mutex;
ForkMutex* g_first = nullptr;

#if defined(__unix__) || defined(__APPLE__)

void UnlockUntil(const ForkMutex* end) {
  for (ForkMutex* m = g_first; m != end; m = m->next()) m->unlock();
}

// Some are held while others are taken, in an order that is not the list's: who
// cannot have all lets all go.
void LockAll() {
  g_list_mutex.lock();
  for (ForkMutex* m = g_first; m != nullptr;) {
    if (m->try_lock()) {
      m = m->next();
    } else {
      UnlockUntil(m);
      std::this_thread::yield();
      m = g_first;
    }
  }
}

void UnlockAll() {
  UnlockUntil(nullptr);
  g_list_mutex.unlock();
}

[[maybe_unused]] const int g_registered =
    pthread_atfork(LockAll, UnlockAll, UnlockAll);

#endif

}  // namespace

ForkMutex::ForkMutex() {
  const std::lock_guard<std::mutex> lock(g_list_mutex);
  next_ = g_first;
  if (g_first != nullptr) g_first->previous_ = this;
  g_first = this;
}

ForkMutex::~ForkMutex() {
  const std::lock_guard<std::mutex> lock(g_list_mutex);
  (previous_ != nullptr ? previous_->next_ : g_first) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
}

}  // namespace fa2::platform
