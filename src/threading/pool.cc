// SPDX-License-Identifier: Apache-2.0
#include "src/threading/pool.h"

#include <algorithm>
#include <atomic>
#include <exception>

#include "src/platform/float_environment.h"

namespace fa2::threading {
namespace {

// The first exception of several workers.
class FirstError {
 public:
  void Keep() {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
  // When all workers have ended.
  void Rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace

void Pool::Run(int64_t items, Function function, const void* body) const {
  const int workers = static_cast<int>(std::min<int64_t>(num_threads_, items));
  if (workers <= 1) {
    for (int64_t item = 0; item < items; ++item) function(body, item, 0);
    return;
  }
  struct Loop {
    Function function;
    const void* body;
    int64_t items;
    FirstError error;
    alignas(128) std::atomic<int64_t> next{0};

    void TakeItems(int worker) {
      for (;;) {
        const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
        if (item >= items) return;
        try {
          function(body, item, worker);
        } catch (...) {
          error.Keep();
        }
      }
    }
  };
  Loop loop{function, body, items, {}, {}};
  RunWorkers(
      workers,
      [](void* l, int worker) {
        const platform::DefaultFloatEnvironment floats;
        static_cast<Loop*>(l)->TakeItems(worker);
      },
      &loop);
  loop.TakeItems(0);  // if nobody came
  loop.error.Rethrow();
}

void Pool::RunTogether(int threads, bool one_step, TeamFunction function,
                       const void* work) const {
  threads = std::clamp(threads, 1, num_threads_);
  if (threads == 1 || one_step) {
    Team team(threads, 0, this);
    return function(work, &team);
  }
  struct Call {
    Team team;
    TeamFunction function;
    const void* work;
    FirstError error;
    std::atomic<bool> led{false};

    // Whoever comes first leads: a thread that were needed might never come.
    void Join(int worker) {
      if (led.exchange(true)) return team.Help(worker);
      team.Lead(worker);
      try {
        function(work, &team);
      } catch (...) {
        error.Keep();
      }
      team.Stop();
    }
  };
  Call call{Team(threads, 0), function, work, {}, {}};
  RunWorkers(
      threads,
      [](void* c, int worker) {
        const platform::DefaultFloatEnvironment floats;
        static_cast<Call*>(c)->Join(worker);
      },
      &call);
  if (!call.led.load()) call.Join(0);
  call.error.Rethrow();
}

}  // namespace fa2::threading
