// SPDX-License-Identifier: Apache-2.0

// Tasks of items: every step sees the items of its task in order, whatever
// the number of threads and tasks.
#include "src/threading/wavefront.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "src/threading/pools.h"

namespace fa2::threading {
namespace {

class Tasks {
 public:
  explicit Tasks(const std::vector<int64_t>& items) : tasks(items.size()) {
    size_t all = items.size();
    for (int64_t n : items) all += static_cast<size_t>(n);
    counters_ = std::vector<Wavefront::Counter>(all);
    Wavefront::Counter* next = counters_.data();
    for (size_t c = 0; c < items.size(); ++c) {
      tasks[c] = {items[c], static_cast<double>(c % 3), next, next + 1};
      next += 1 + items[c];
    }
  }
  int64_t count() const { return static_cast<int64_t>(tasks.size()); }
  std::vector<Wavefront::Task> tasks;

 private:
  std::vector<Wavefront::Counter> counters_;
};

TEST(Wavefront, StepsSeeItemsInOrder) {
  constexpr int64_t kSteps = 9;
  const std::vector<std::vector<int64_t>> shapes = {
      {}, {0}, {1}, {5}, {64}, {1, 0, 7}, {3, 3, 3, 3, 3, 3, 3}, {40, 1, 1, 2}};
  for (const int threads : {1, 2, 3, 8, 16}) {
    const std::unique_ptr<Pool> pool = MakeTbbPool(threads);
    for (const std::vector<int64_t>& items : shapes) {
      SCOPED_TRACE(std::to_string(threads) + " threads, " +
                   std::to_string(items.size()) + " tasks");
      for (int round = 0; round < 10; ++round) {
        const auto skips = [round](int64_t item, int64_t step) {
          return round % 2 == 1 && (item + 2 * step) % 3 == 0;
        };
        Tasks work(items);
        // Not atomic: the thread sanitizer tells whether semaphores order
        // accesses.
        std::vector<std::vector<std::vector<int64_t>>> seen(
            items.size(), std::vector<std::vector<int64_t>>(kSteps));
        std::vector<std::vector<int>> worker_of(items.size());
        for (size_t c = 0; c < items.size(); ++c) {
          worker_of[c].assign(static_cast<size_t>(items[c]), -1);
        }
        pool->Together(
            pool->num_threads(), /*one_step=*/false, [&](Team& team) {
              Wavefront::Run(team, work.tasks.data(), work.count(),
                             [&](int64_t c, int64_t item, int worker,
                                 Wavefront::Semaphore& semaphore) {
                               worker_of[c][item] = worker;
                               for (int64_t step = 0; step < kSteps; ++step) {
                                 if (skips(item, step)) {
                                   semaphore.Skip(step);
                                   continue;
                                 }
                                 semaphore.Wait(step);
                                 seen[c][step].push_back(item);
                                 semaphore.Release(step);
                               }
                               semaphore.ReleaseSkipped();
                             });
            });
        for (size_t c = 0; c < items.size(); ++c) {
          for (int64_t step = 0; step < kSteps; ++step) {
            std::vector<int64_t> in_order;
            for (int64_t i = 0; i < items[c]; ++i) {
              if (!skips(i, step)) in_order.push_back(i);
            }
            EXPECT_EQ(seen[c][step], in_order);
          }
          for (const int worker : worker_of[c]) {
            EXPECT_GE(worker, 0);
            EXPECT_LT(worker, threads);
          }
        }
      }
    }
  }
}

TEST(Wavefront, NobodyWaitsForAnItemThatFailed) {
  const std::unique_ptr<Pool> pool = MakeTbbPool(4);
  Tasks work({8, 8});
  const auto run = [&] {
    pool->Together(pool->num_threads(), /*one_step=*/false, [&](Team& team) {
      Wavefront::Run(
          team, work.tasks.data(), work.count(),
          [](int64_t, int64_t item, int, Wavefront::Semaphore& semaphore) {
            for (int64_t step = 0; step < 4; ++step) {
              semaphore.Wait(step);
              if (item == 3 && step == 2) throw std::runtime_error("failed");
              semaphore.Release(step);
            }
          });
    });
  };
  EXPECT_THROW(run(), std::runtime_error);
}

}  // namespace
}  // namespace fa2::threading
