// SPDX-License-Identifier: Apache-2.0

// Who runs what: independent items handed to a fixed number of workers in
// ascending order, on threads of whoever has them.
#ifndef FA2_SRC_THREADING_POOL_H_
#define FA2_SRC_THREADING_POOL_H_

#include <cstdint>

#include "src/threading/team.h"

namespace fa2::threading {

// The threads of one context. Kinds of pools differ in RunWorkers alone, so
// that a call gives the same bits on all of them. Several callers may use one
// pool at once, and a child process may after fork().
class Pool {
 public:
  explicit Pool(int num_threads)
      : num_threads_(num_threads > 1 ? num_threads : 1) {}
  virtual ~Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // As ContextInfo has it.
  virtual const char* name() const = 0;
  int num_threads() const { return num_threads_; }

  using Worker = void (*)(void* argument, int index);

  // Calls worker(argument, i), which does not throw, for indices i of
  // [0, workers), on any threads, several at the same time as far as there are
  // threads, no index twice at the same time; returns when those calls have.
  // Only speed depends on how many calls there are: one worker does the work of
  // those that do not come. workers > 1.
  virtual void RunWorkers(int workers, Worker worker, void* argument) const = 0;

  // Calls body(item, worker) once for every item in [0, items), workers taking
  // the next item when free, so that a list sorted longest first balances
  // itself. 0 <= worker < num_threads(); a worker runs one item at a time.
  // Returns when all are done. An exception of a body is thrown here.
  template <class Body>
  void For(int64_t items, const Body& body) const {
    Run(
        items,
        [](const void* b, int64_t item, int worker) {
          (*static_cast<const Body*>(b))(item, worker);
        },
        &body);
  }

  // Calls work(team), a Team&, on one of at most `threads` threads; the others
  // stand by for the items of the team until work returns. With `one_step`,
  // which is for work that calls the team once, they are called for then only.
  template <class Work>
  void Together(int threads, bool one_step, const Work& work) const {
    RunTogether(
        threads, one_step,
        [](const void* w, Team* team) {
          (*static_cast<const Work*>(w))(*team);
        },
        &work);
  }

 private:
  using Function = void (*)(const void* body, int64_t item, int worker);
  void Run(int64_t items, Function function, const void* body) const;
  using TeamFunction = void (*)(const void* work, Team* team);
  void RunTogether(int threads, bool one_step, TeamFunction function,
                   const void* work) const;

  const int num_threads_;
};

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_POOL_H_
