// SPDX-License-Identifier: Apache-2.0

// oneTBB's arenas, which pools use one after another.
#ifndef FA2_SRC_THREADING_ARENA_H_
#define FA2_SRC_THREADING_ARENA_H_

#include <tbb/task_arena.h>

#include <atomic>
#include <memory>

namespace fa2::threading {

class Arena {
 public:
  explicit Arena(int num_threads)
      : tasks(num_threads), num_threads_(num_threads) {}
  ~Arena() { Discount(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int num_threads() const { return num_threads_; }

  // Threads, callers' and TBB's, that the arenas which are counted may want at
  // once: TBB may have as many workers, and those of its own default.
  static int Wanted();
  void Count() { SetCounted(true); }
  void Discount() { SetCounted(false); }

  tbb::task_arena tasks;
  std::atomic<bool> trusted{false};  // the system gives its threads
  std::atomic<bool> broken{false};   // TBB has lost count of its tasks

 private:
  void SetCounted(bool counted);

  const int num_threads_;
  bool counted_ = false;
};

// One that was given back, or a new one.
std::shared_ptr<Arena> TakeArena(int num_threads);

// For the next pool of as many threads.
void GiveBackArena(std::shared_ptr<Arena> arena);

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_ARENA_H_
