// SPDX-License-Identifier: Apache-2.0
#include <tbb/global_control.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <atomic>
#include <cstddef>
#include <memory>

#include "src/platform/fork_count.h"
#include "src/threading/own_threads.h"
#include "src/threading/pools.h"

namespace fa2::threading {
namespace {

// ThreadSanitizer does not see the synchronisation inside TBB, which
// distributions build without it.
#if defined(__SANITIZE_THREAD__)
constexpr bool kOwnThreads = true;
#elif defined(__has_feature)
constexpr bool kOwnThreads = __has_feature(thread_sanitizer);
#else
constexpr bool kOwnThreads = false;
#endif

// Without this TBB has as many workers as cores, and says so on stderr when an
// arena asks for more.
void AllowManyWorkers() {
  constexpr size_t kWorkers = 1024;
  static const tbb::global_control control(
      tbb::global_control::max_allowed_parallelism, kWorkers);
  (void)control;
}

// Whether TBB's workers are of this process: a child has none of those that it
// inherits, and TBB does not replace them.
bool HasWorkers() {
  static const int forks = platform::ForkCount();
  return forks == platform::ForkCount();
}

// Threads, a caller's and TBB's, that the system is known to give.
std::atomic<int> g_granted{1};

class TbbPool : public Pool {
 public:
  explicit TbbPool(int num_threads)
      : Pool(num_threads),
        arena_((AllowManyWorkers(), new tbb::task_arena(num_threads))) {
    (void)HasWorkers();
  }

  ~TbbPool() override {
    // Taking down an arena whose workers were lost by a fork would wait for
    // them for ever.
    if (!HasWorkers()) (void)arena_.release();
  }

  const char* name() const override { return "tbb"; }

  void RunWorkers(int workers, Worker worker, void* argument) const override {
    if (kOwnThreads || !HasWorkers()) {
      (void)RunOnOwnThreads(workers, workers, worker, argument);
      return;
    }
    // An arena with work wants all its threads, and TBB ends the process where
    // one of its workers cannot start another.
    if (g_granted.load() < num_threads()) {
      const int granted =
          RunOnOwnThreads(num_threads(), workers, worker, argument);
      if (granted >= num_threads()) g_granted.store(granted);
      return;
    }
    // Slots number the workers when they are all of the arena's threads, who so
    // find in their caches what they left there in the call before.
    const bool everyone = workers == num_threads();
    const auto run = [worker, argument, everyone](int index) {
      worker(argument,
             everyone ? tbb::this_task_arena::current_thread_index() : index);
    };
    arena_->execute([&run, workers] {
      // Isolated: while this waits for its helpers it must not take up another
      // call's, which would keep it until that call ends.
      tbb::this_task_arena::isolate([&run, workers] {
        tbb::task_group group;
        try {
          for (int index = 1; index < workers; ++index) {
            group.run([&run, index] { run(index); });
          }
        } catch (...) {
          // No memory for a task: those that there are will do.
        }
        run(0);
        group.wait();
      });
    });
  }

 private:
  std::unique_ptr<tbb::task_arena> arena_;
};

}  // namespace

std::unique_ptr<Pool> MakeTbbPool(int num_threads) {
  return std::make_unique<TbbPool>(num_threads);
}

}  // namespace fa2::threading
