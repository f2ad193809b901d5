// SPDX-License-Identifier: Apache-2.0

// Work whose order counts: tasks of items that add to the same sums.
#ifndef FA2_SRC_THREADING_WAVEFRONT_H_
#define FA2_SRC_THREADING_WAVEFRONT_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "src/threading/team.h"
#include "src/threading/wait.h"

namespace fa2::threading {

// Every item of a task goes through the same steps in the same order, and
// through each after the item before it. So items of a task run at the same
// time, while what they share of a step sees them in their order, on any number
// of threads: a diagonal wavefront over items and steps.
class Wavefront {
 public:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  struct Task {
    int64_t items = 0;
    double cost = 0.0;            // of an item, in any unit
    Counter* claimed = nullptr;   // items that workers have taken
    Counter* released = nullptr;  // [items]: steps that the item is through
  };

  // An item's semaphore over the steps: it waits for the item before it and
  // releases the one after it.
  class Semaphore {
   public:
    Semaphore(const Task& task, int64_t item)
        : before_(item > 0 ? &task.released[item - 1].value : nullptr),
          own_(task.released[item].value) {}
    // Nobody waits for an item that failed.
    ~Semaphore() {
      own_.store(std::numeric_limits<int64_t>::max(),
                 std::memory_order_release);
    }
    Semaphore(const Semaphore&) = delete;
    Semaphore& operator=(const Semaphore&) = delete;

    // Returns when the item before has released `step`. Steps are counted from
    // 0.
    void Wait(int64_t step) {
      if (before_ == nullptr) return;
      for (threading::Wait wait; seen_ <= step;) {
        seen_ = before_->load(std::memory_order_acquire);
        if (seen_ <= step) wait();
      }
    }
    void Release(int64_t step) {
      own_.store(step + 1, std::memory_order_release);
      skipped_ = 0;
    }
    // In place of Wait and Release for a step in which the item does nothing:
    // releases the step now if the item before has, else with a later one or
    // by ReleaseSkipped, so that nobody waits for the sake of others.
    void Skip(int64_t step) {
      if (before_ != nullptr && seen_ <= step) {
        seen_ = before_->load(std::memory_order_acquire);
      }
      if (before_ == nullptr || seen_ > step) {
        Release(step);
      } else {
        skipped_ = step + 1;
      }
    }
    // After the last step.
    void ReleaseSkipped() {
      if (skipped_ == 0) return;
      Wait(skipped_ - 1);
      Release(skipped_ - 1);
    }

   private:
    const std::atomic<int64_t>* before_;
    std::atomic<int64_t>& own_;
    int64_t seen_ = 0;
    int64_t skipped_ = 0;  // steps up to the last that is not released yet
  };

  // Calls body(task, item, worker, semaphore) once for every item of `count`
  // tasks, whose counters are 0. A worker begins as Team::For has it, stays
  // with a task, and then goes where most is left. An item is taken after those
  // before it, by a worker that does nothing else until its end, so that
  // waiting ends.
  template <class Body>
  static void Run(Team& team, const Task* tasks, int64_t count,
                  const Body& body) {
    int64_t items = 0;
    for (int64_t t = 0; t < count; ++t) items += tasks[t].items;
    const auto work_through = [&](int64_t t, int worker) {
      const Task& task = tasks[t];
      while (Left(task) > 0) {
        const int64_t item =
            task.claimed->value.fetch_add(1, std::memory_order_relaxed);
        if (item >= task.items) return;
        Semaphore semaphore(task, item);
        body(t, item, worker, semaphore);
      }
    };
    // The last ones of these are for workers who look where they can help.
    const int64_t helpers =
        std::min<int64_t>(items > 1 ? items : 0, team.num_threads());
    team.For(count + helpers, [&](int64_t t, int worker) {
      if (t < count) return work_through(t, worker);
      for (;;) {
        const Task* const most = std::max_element(
            tasks, tasks + count, [](const Task& a, const Task& b) {
              return static_cast<double>(Left(a)) * a.cost <
                     static_cast<double>(Left(b)) * b.cost;
            });
        if (Left(*most) <= 0) return;
        work_through(most - tasks, worker);
      }
    });
  }

 private:
  static int64_t Left(const Task& task) {
    return task.items - task.claimed->value.load(std::memory_order_relaxed);
  }
};

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_WAVEFRONT_H_
