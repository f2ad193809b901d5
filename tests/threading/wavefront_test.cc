// Chains of items: every cell sees the items of its chain in order, whatever
// the number of threads and chains.
#include "src/threading/wavefront.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "src/threading/parallel.h"

namespace fa2::threading {
namespace {

class Chains {
 public:
  explicit Chains(const std::vector<int64_t>& items) : chains(items.size()) {
    size_t all = items.size();
    for (int64_t n : items) all += static_cast<size_t>(n);
    counters_ = std::vector<Wavefront::Counter>(all);
    Wavefront::Counter* next = counters_.data();
    for (size_t c = 0; c < items.size(); ++c) {
      chains[c] = {items[c], static_cast<double>(c % 3), next, next + 1};
      next += 1 + items[c];
    }
  }
  int64_t count() const { return static_cast<int64_t>(chains.size()); }
  std::vector<Wavefront::Chain> chains;

 private:
  std::vector<Wavefront::Counter> counters_;
};

TEST(Wavefront, CellsSeeItemsInOrder) {
  constexpr int64_t kCells = 9;
  const std::vector<std::vector<int64_t>> shapes = {
      {}, {0}, {1}, {5}, {64}, {1, 0, 7}, {3, 3, 3, 3, 3, 3, 3}, {40, 1, 1, 2}};
  for (const int threads : {1, 2, 3, 8, 16}) {
    const Pool pool(threads);
    for (const std::vector<int64_t>& items : shapes) {
      SCOPED_TRACE(std::to_string(threads) + " threads, " +
                   std::to_string(items.size()) + " chains");
      for (int round = 0; round < 10; ++round) {
        Chains work(items);
        // Not atomic: the thread sanitizer tells whether turns order accesses.
        std::vector<std::vector<std::vector<int64_t>>> seen(
            items.size(), std::vector<std::vector<int64_t>>(kCells));
        std::vector<std::vector<int>> worker_of(items.size());
        for (size_t c = 0; c < items.size(); ++c) {
          worker_of[c].assign(static_cast<size_t>(items[c]), -1);
        }
        pool.Together(pool.num_threads(), [&](Team& team) {
          Wavefront::Run(
              team, work.chains.data(), work.count(),
              [&](int64_t c, int64_t item, int worker, Wavefront::Turn& turn) {
                worker_of[c][item] = worker;
                for (int64_t cell = 0; cell < kCells; ++cell) {
                  turn.Await(cell);
                  seen[c][cell].push_back(item);
                  turn.Finish(cell);
                }
              });
        });
        for (size_t c = 0; c < items.size(); ++c) {
          std::vector<int64_t> in_order(static_cast<size_t>(items[c]));
          for (int64_t i = 0; i < items[c]; ++i) in_order[i] = i;
          for (const auto& cell : seen[c]) EXPECT_EQ(cell, in_order);
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
  const Pool pool(4);
  Chains work({8, 8});
  const auto run = [&] {
    pool.Together(pool.num_threads(), [&](Team& team) {
      Wavefront::Run(team, work.chains.data(), work.count(),
                     [](int64_t, int64_t item, int, Wavefront::Turn& turn) {
                       for (int64_t cell = 0; cell < 4; ++cell) {
                         turn.Await(cell);
                         if (item == 3 && cell == 2)
                           throw std::runtime_error("failed");
                         turn.Finish(cell);
                       }
                     });
    });
  };
  EXPECT_THROW(run(), std::runtime_error);
}

}  // namespace
}  // namespace fa2::threading
