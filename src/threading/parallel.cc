// SPDX-License-Identifier: Apache-2.0
#include "src/threading/parallel.h"

#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "src/platform/fork_count.h"

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

}  // namespace

class Pool::Arena {
 public:
  explicit Arena(int num_threads)
      : forks((AllowManyWorkers(), platform::ForkCount())),
        arena(num_threads) {}
  int forks;  // an arena made before a fork has lost its workers
  tbb::task_arena arena;
};

Pool::Pool(int num_threads)
    : num_threads_(std::max(1, num_threads)), arena_(new Arena(num_threads_)) {}

Pool::~Pool() {
  // Taking down an arena whose workers were lost by a fork would wait for them
  // for ever.
  if (arena_->forks != platform::ForkCount()) (void)arena_.release();
}

void Pool::Run(int64_t items, Function function, const void* body) const {
  if (items <= 0) return;
  const int workers = static_cast<int>(std::min<int64_t>(num_threads_, items));
  if (workers == 1) {
    for (int64_t item = 0; item < items; ++item) function(body, item, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  const auto work = [&next, items, function, body](int worker) {
    for (;;) {
      const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      function(body, item, worker);
    }
  };
  if (kOwnThreads || arena_->forks != platform::ForkCount()) {
    std::vector<std::thread> threads;
    for (int worker = 1; worker < workers; ++worker)
      threads.emplace_back(work, worker);
    work(0);
    for (std::thread& thread : threads) thread.join();
    return;
  }
  // One task a worker: a task that starts late finds nothing left and ends at
  // once.
  arena_->arena.execute([&] {
    tbb::parallel_for(
        0, workers, [&work](int worker) { work(worker); },
        tbb::simple_partitioner());
  });
}

namespace {

// Helpers as tasks of the arena.
class TaskLauncher : public Team::Launcher {
 public:
  // `everyone`: the team is all of the arena's threads. Then slots number its
  // workers, who so find in their caches what they left there in the call
  // before.
  explicit TaskLauncher(bool everyone) : everyone_(everyone) {}

  int leader() const { return Number(0); }
  void Launch(Team* team, int helpers) override {
    for (int worker = 1; worker <= helpers; ++worker) {
      group_.run([this, team, worker] { team->Help(Number(worker)); });
    }
  }
  void Wait() { group_.wait(); }

 private:
  int Number(int worker) const {
    return everyone_ ? tbb::this_task_arena::current_thread_index() : worker;
  }

  const bool everyone_;
  tbb::task_group group_;
};

class ThreadLauncher : public Team::Launcher {
 public:
  int leader() const { return 0; }
  void Launch(Team* team, int helpers) override {
    for (int worker = 1; worker <= helpers; ++worker) {
      threads_.emplace_back([team, worker] { team->Help(worker); });
    }
  }
  void Wait() {
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::vector<std::thread> threads_;
};

template <class Launcher, class Work>
void RunTeam(int num_threads, Launcher& launcher, const Work& work) {
  Team team(num_threads, launcher.leader(), &launcher);
  // Helpers use the team until they have all been told to stop.
  const auto end = [&] {
    team.Stop();
    launcher.Wait();
  };
  try {
    work(&team);
  } catch (...) {
    end();
    throw;
  }
  end();
}

}  // namespace

void Pool::RunTogether(int threads, TeamFunction function,
                       const void* work) const {
  const auto run = [function, work](Team* team) { function(work, team); };
  threads = std::min(threads, num_threads_);
  if (threads <= 1) {
    Team team(1, 0, nullptr);
    return run(&team);
  }
  if (kOwnThreads || arena_->forks != platform::ForkCount()) {
    ThreadLauncher launcher;
    return RunTeam(threads, launcher, run);
  }
  arena_->arena.execute([&] {
    // Isolated: while this waits for its helpers it must not take up another
    // call's, which would keep it until that call ends.
    tbb::this_task_arena::isolate([&] {
      TaskLauncher launcher(threads == num_threads_);
      RunTeam(threads, launcher, run);
    });
  });
}

}  // namespace fa2::threading
