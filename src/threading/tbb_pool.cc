// SPDX-License-Identifier: Apache-2.0
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>

#include "src/platform/fork_count.h"
#include "src/threading/arena.h"
#include "src/threading/own_threads.h"
#include "src/threading/pools.h"
#include "src/threading/wait.h"

namespace fa2::threading {
namespace {

// ThreadSanitizer does not see the synchronisation inside TBB, which
// distributions build without it; scripts/instrumented_tbb.sh builds one with.
#if defined(FA2_INSTRUMENTED_TBB)
constexpr bool kOwnThreads = false;
#elif defined(__SANITIZE_THREAD__)
constexpr bool kOwnThreads = true;
#elif defined(__has_feature)
constexpr bool kOwnThreads = __has_feature(thread_sanitizer);
#else
constexpr bool kOwnThreads = false;
#endif

// Whether TBB's workers are of this process: a child has none of those that it
// inherits, and TBB does not replace them.
bool HasWorkers() {
  static const int forks = platform::ForkCount();
  return forks == platform::ForkCount();
}

// Threads, callers' and TBB's, that the system is known to give.
std::atomic<int> g_granted{1};

class TbbPool : public Pool {
 public:
  explicit TbbPool(int num_threads)
      : Pool(num_threads), arena_(TakeArena(num_threads)) {
    (void)HasWorkers();
  }

  ~TbbPool() override {
    if (!HasWorkers()) {
      // Taking down an arena whose workers were lost by a fork would wait for
      // them for ever: a reference to it is never given back.
      using Reference = std::shared_ptr<Arena>;
      alignas(Reference) std::byte kept[sizeof(Reference)];
      new (kept) Reference(arena_);
    } else if (arena_->broken.load()) {
      arena_->Discount();
    } else {
      GiveBackArena(arena_);
    }
  }

  const char* name() const override { return "tbb"; }

  void RunWorkers(int workers, Worker worker, void* argument) const override {
    if (kOwnThreads || arena_->broken.load() || !HasWorkers()) {
      (void)RunOnOwnThreads(workers, workers, worker, argument);
      return;
    }
    if (!arena_->trusted.load() && !Trust(workers, worker, argument)) return;
    std::unique_ptr<Call> call(new (std::nothrow) Call);
    if (call == nullptr) return;
    call->worker = worker;
    call->argument = argument;
    // Slots number the workers when they are all of the arena's threads, who so
    // find in their caches what they left there in the call before.
    call->by_slot = workers == num_threads();
    bool complete = false;
    try {
      arena_->tasks.execute([&] {
        // Isolated: while this waits for its helpers it must not take up
        // another call's, which would keep it until that call ends.
        tbb::this_task_arena::isolate([&] {
          const bool started = Start(call.get(), workers);
          call->Work(0);
          call->End();
          if (!started || arena_->broken.load()) return;
          call->group.wait();
          complete = true;
        });
      });
    } catch (...) {
      // Nobody came, or those that did will do.
    }
    if (complete) return;
    // TBB has lost count: of the group's tasks where it had no memory for one,
    // of the arena's threads where it could not start one. Who waits for them
    // waits for ever, so both are left behind.
    arena_->broken.store(true);
    call->End();
    LeaveBehind(std::move(call));
  }

 private:
  // What the tasks of a call share.
  struct Call {
    tbb::task_group group;
    Worker worker = nullptr;
    void* argument = nullptr;
    bool by_slot = false;
    std::atomic<int> inside{0};
    std::atomic<bool> over{false};
    // Where it is left behind.
    std::shared_ptr<Arena> arena;
    Call* next = nullptr;

    void Work(int index) {
      worker(argument,
             by_slot ? tbb::this_task_arena::current_thread_index() : index);
    }
    // As a task, which may be begun when the call is over.
    void Help(int index) {
      inside.fetch_add(1);
      if (!over.load()) Work(index);
      inside.fetch_sub(1);
    }
    // Returns when no helper is at work, and none will be.
    void End() {
      over.exchange(true);
      for (Wait wait; inside.load() != 0;) wait();
    }
  };

  // Whether TBB may have the call. An arena with work wants all its threads,
  // for a while after it too, and TBB ends the process where one of its workers
  // cannot start another. So the first calls run on threads of their own, as
  // many as TBB may come to start.
  bool Trust(int workers, Worker worker, void* argument) const {
    arena_->Count();
    const int wanted = Arena::Wanted();
    int granted = g_granted.load();
    if (granted >= wanted) {
      arena_->trusted.store(true);
      return true;
    }
    if (RunOnOwnThreads(wanted, workers, worker, argument) >= wanted) {
      while (granted < wanted &&
             !g_granted.compare_exchange_weak(granted, wanted)) {
      }
    }
    return false;
  }

  // Whether there is a task for every worker but the first.
  static bool Start(Call* call, int workers) {
    try {
      for (int index = 1; index < workers; ++index) {
        call->group.run([call, index] { call->Help(index); });
      }
    } catch (...) {
      return false;
    }
    return true;
  }

  // In a list, so that leak checkers find it.
  void LeaveBehind(std::unique_ptr<Call> call) const {
    static std::atomic<Call*> first{nullptr};
    call->arena = arena_;
    call->next = first.load();
    while (!first.compare_exchange_weak(call->next, call.get())) {
    }
    (void)call.release();
  }

  const std::shared_ptr<Arena> arena_;
};

}  // namespace

std::unique_ptr<Pool> MakeTbbPool(int num_threads) {
  return std::make_unique<TbbPool>(num_threads);
}

}  // namespace fa2::threading
