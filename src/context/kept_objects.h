// SPDX-License-Identifier: Apache-2.0

// What a call leaves to later calls of its kind on the same context: vectors
// that have their size, so that a second call allocates nothing. Not for each
// thread: registering the destructor of a thread_local object takes memory, and
// where there is none glibc ends the process.
#ifndef FA2_SRC_CONTEXT_KEPT_OBJECTS_H_
#define FA2_SRC_CONTEXT_KEPT_OBJECTS_H_

#include <memory>
#include <mutex>
#include <vector>

#include "src/platform/fork_mutex.h"

namespace fa2 {

// As many objects of a type as calls have been at work with one at once.
class KeptObjects {
 public:
  KeptObjects() = default;
  KeptObjects(const KeptObjects&) = delete;
  KeptObjects& operator=(const KeptObjects&) = delete;

  // An object that no call uses, or a new one.
  template <class T>
  T* Take() {
    const std::lock_guard<platform::ForkMutex> lock(mutex_);
    for (Slot& slot : slots_) {
      if (slot.type == &kType<T> && !slot.in_use) {
        slot.in_use = true;
        return static_cast<T*>(slot.object.get());
      }
    }
    slots_.push_back({&kType<T>, true, std::make_shared<T>()});
    return static_cast<T*>(slots_.back().object.get());
  }

  void GiveBack(const void* object) {
    const std::lock_guard<platform::ForkMutex> lock(mutex_);
    for (Slot& slot : slots_) {
      if (slot.object.get() == object) slot.in_use = false;
    }
  }

 private:
  template <class T>
  inline static char kType = 0;  // its address stands for T

  struct Slot {
    const void* type;
    bool in_use;
    std::shared_ptr<void> object;  // which knows how T is destroyed
  };
  platform::ForkMutex mutex_;
  std::vector<Slot> slots_;
};

// One of them for the length of a call.
template <class T>
class KeptObject {
 public:
  explicit KeptObject(KeptObjects& objects)
      : objects_(objects), object_(objects.Take<T>()) {}
  ~KeptObject() { objects_.GiveBack(object_); }
  KeptObject(const KeptObject&) = delete;
  KeptObject& operator=(const KeptObject&) = delete;

  T& operator*() const { return *object_; }

 private:
  KeptObjects& objects_;
  T* const object_;
};

}  // namespace fa2

#endif  // FA2_SRC_CONTEXT_KEPT_OBJECTS_H_
