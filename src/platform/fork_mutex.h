// SPDX-License-Identifier: Apache-2.0

// A mutex for what a child of fork() goes on using.
#ifndef FA2_SRC_PLATFORM_FORK_MUTEX_H_
#define FA2_SRC_PLATFORM_FORK_MUTEX_H_

#include <mutex>

namespace fa2::platform {

// fork() waits until nobody holds one, and lets nobody take one until the child
// is there: a child never finds one locked by a thread that it does not have,
// nor what it protects half changed. To be held for short, and with no other
// one made or destroyed meanwhile.
class ForkMutex {
 public:
  ForkMutex();
  ~ForkMutex();
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock() { mutex_.lock(); }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  // The next one of all that there are, for fork() alone.
  ForkMutex* next() const { return next_; }

 private:
  std::mutex mutex_;
  ForkMutex* previous_ = nullptr;
  ForkMutex* next_ = nullptr;
};

}  // namespace fa2::platform

#endif  // FA2_SRC_PLATFORM_FORK_MUTEX_H_
