// SPDX-License-Identifier: Apache-2.0

// The threads of one call. Where it consists of several steps they stand by
// from step to step, so that a step begins and ends within a microsecond or two
// where waking them takes ten; a single step is a parallel loop of the pool.
#ifndef FA2_SRC_THREADING_TEAM_H_
#define FA2_SRC_THREADING_TEAM_H_

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>

namespace fa2::threading {

class Pool;

class Team {
 public:
  // `leader` is the worker number of the thread that calls For. With a pool
  // each step is a loop of its own on the pool's threads, without helpers that
  // stand by: on 16 threads of an AMX machine and libgomp 1.8 us less where
  // there is one step, 1.6 us more where there are two.
  Team(int num_threads, int leader, const Pool* pool = nullptr);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int num_threads() const { return num_threads_; }

  // The items that a worker begins with. Every num_threads-th: a list sorted
  // longest first then balances itself. Or a run of them, for items of one
  // length whose data lie side by side: what a core fetches ahead is its own,
  // and loops of the host, which deal out runs, have left it in its caches.
  enum class Share { kEveryNth, kRun };

  // Calls body(item, worker) once for every item in [0, items), and returns
  // when all are done; 0 <= worker < num_threads, one item at a time each.
  // A worker begins with its share, which is where the data that it worked on
  // for these items in an earlier step or call lie in its caches; then it takes
  // what others have not come to. Helpers need not come, nor soon. Only the
  // leader may call this, and not from a body. An exception of a body is thrown
  // here.
  template <class Body>
  void For(int64_t items, const Body& body, Share share = Share::kEveryNth) {
    Run(
        items, share,
        [](const void* b, int64_t item, int worker) {
          (*static_cast<const Body*>(b))(item, worker);
        },
        &body);
  }

  // The end of the run of `items` items that an item is in.
  int64_t RunEnd(int64_t item, int64_t items) const {
    const int64_t worker = ((item + 1) * num_threads_ - 1) / items;
    return RunBegin(worker + 1, items);
  }

  // Before the first For: the calling thread leads as this worker.
  void Lead(int worker) { leader_ = worker; }

  // What another thread, as a worker of its own, does until Stop().
  void Help(int worker);
  void Stop() { stop_.store(true); }

 private:
  using Function = void (*)(const void* body, int64_t item, int worker);
  // On cache lines of their own, two each, since lines are fetched in pairs.
  struct Worker {
    alignas(128) std::atomic<int64_t> next{0};  // of its items
    alignas(128) std::atomic<int64_t> step{0};  // that it works on, or 0
  };
  int64_t RunBegin(int64_t worker, int64_t items) const {
    return worker * items / num_threads_;
  }
  void Run(int64_t items, Share share, Function function, const void* body);
  void TakeItems(int worker);
  void TakeItemsOfHelpers();
  void TakeItemsOfPool();

  const int num_threads_;
  int leader_;
  const Pool* const pool_;  // or nullptr
  std::unique_ptr<Worker[]> workers_;
  // The step under way: written before `step_` becomes its number, and again
  // only when no worker is at it.
  int64_t items_ = 0;
  Share share_ = Share::kEveryNth;
  Function function_ = nullptr;
  const void* body_ = nullptr;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  int64_t steps_ = 0;
  alignas(128) std::atomic<int64_t> step_{0};  // 0 between steps
  std::atomic<bool> stop_{false};
};

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_TEAM_H_
