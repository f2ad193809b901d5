// SPDX-License-Identifier: Apache-2.0

// Who runs what: independent items handed to a fixed number of workers in
// ascending order.
#ifndef FA2_SRC_THREADING_PARALLEL_H_
#define FA2_SRC_THREADING_PARALLEL_H_

#include <cstdint>
#include <memory>

#include "src/threading/team.h"

namespace fa2::threading {

// Threads of one context, over a oneTBB arena. After fork() the child's copy
// runs on threads of its own, since TBB's workers do not survive a fork.
class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls body(item, worker) once for every item in [0, items), workers taking
  // the next item when free, so that a list sorted longest first balances
  // itself. 0 <= worker < num_threads(); a worker runs one item at a time.
  // Returns when all are done. The caller's thread takes part; several callers
  // may use one pool at once.
  template <class Body>
  void For(int64_t items, const Body& body) const {
    Run(
        items,
        [](const void* b, int64_t item, int worker) {
          (*static_cast<const Body*>(b))(item, worker);
        },
        &body);
  }

  // Calls work(team), a Team&, on the caller's thread. The other threads of a
  // team, which has at most `threads`, join when it first has items for
  // several.
  template <class Work>
  void Together(int threads, const Work& work) const {
    RunTogether(
        threads,
        [](const void* w, Team* team) {
          (*static_cast<const Work*>(w))(*team);
        },
        &work);
  }

 private:
  using TeamFunction = void (*)(const void* work, Team* team);
  void RunTogether(int threads, TeamFunction function, const void* work) const;
  using Function = void (*)(const void* body, int64_t item, int worker);
  void Run(int64_t items, Function function, const void* body) const;

  class Arena;
  int num_threads_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_PARALLEL_H_
