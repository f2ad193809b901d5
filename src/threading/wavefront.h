// Work whose order counts: chains of items that add to the same sums.
#ifndef FA2_SRC_THREADING_WAVEFRONT_H_
#define FA2_SRC_THREADING_WAVEFRONT_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "src/threading/team.h"
#include "src/threading/wait.h"

namespace fa2::threading {

// Every item of a chain works through the same cells in the same order, and has
// its turn at each after the item before it. So items of a chain run at the
// same time, while what they share of a cell sees them in their order, on any
// number of threads.
class Wavefront {
 public:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  struct Chain {
    int64_t items = 0;
    double cost = 0.0;           // of an item, in any unit
    Counter* claimed = nullptr;  // items that workers have taken
    Counter* finished =
        nullptr;  // [items]: cells at which the item had its turn
  };

  // Where an item stands.
  class Turn {
   public:
    Turn(const Chain& chain, int64_t item)
        : before_(item > 0 ? &chain.finished[item - 1].value : nullptr),
          own_(chain.finished[item].value) {}
    // Nobody waits for an item that failed.
    ~Turn() {
      own_.store(std::numeric_limits<int64_t>::max(),
                 std::memory_order_release);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Cells are counted from 0.
    void Await(int64_t cell) {
      if (before_ == nullptr) return;
      for (Wait wait; seen_ <= cell;) {
        seen_ = before_->load(std::memory_order_acquire);
        if (seen_ <= cell) wait();
      }
    }
    void Finish(int64_t cell) {
      own_.store(cell + 1, std::memory_order_release);
    }

   private:
    const std::atomic<int64_t>* before_;
    std::atomic<int64_t>& own_;
    int64_t seen_ = 0;
  };

  // Calls body(chain, item, worker, turn) once for every item of `count`
  // chains, whose counters are 0. A worker begins as Team::For has it, stays
  // with a chain, and then goes where most is left. An item is taken after
  // those before it, by a worker that does nothing else until its end, so that
  // waiting ends.
  template <class Body>
  static void Run(Team& team, const Chain* chains, int64_t count,
                  const Body& body) {
    int64_t items = 0;
    for (int64_t c = 0; c < count; ++c) items += chains[c].items;
    const auto work_through = [&](int64_t c, int worker) {
      const Chain& chain = chains[c];
      while (Left(chain) > 0) {
        const int64_t item =
            chain.claimed->value.fetch_add(1, std::memory_order_relaxed);
        if (item >= chain.items) return;
        Turn turn(chain, item);
        body(c, item, worker, turn);
      }
    };
    // The last ones of these are for workers who look where they can help.
    const int64_t helpers =
        std::min<int64_t>(items > 1 ? items : 0, team.num_threads());
    team.For(count + helpers, [&](int64_t c, int worker) {
      if (c < count) return work_through(c, worker);
      for (;;) {
        const Chain* const most = std::max_element(
            chains, chains + count, [](const Chain& a, const Chain& b) {
              return static_cast<double>(Left(a)) * a.cost <
                     static_cast<double>(Left(b)) * b.cost;
            });
        if (Left(*most) <= 0) return;
        work_through(most - chains, worker);
      }
    });
  }

 private:
  static int64_t Left(const Chain& chain) {
    return chain.items - chain.claimed->value.load(std::memory_order_relaxed);
  }
};

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_WAVEFRONT_H_
