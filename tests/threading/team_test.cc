// SPDX-License-Identifier: Apache-2.0

// The threads of a call, all of a pool or some: every item of every step runs
// once, steps follow each other, exceptions reach the caller, and several
// callers may share a pool.
#include "src/threading/team.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "src/threading/pools.h"

namespace fa2::threading {
namespace {

// Steps of all sizes, each item counting those of the step before: they must
// all be over. Returns the number of items that ran otherwise than once, or on
// a worker that there is not.
int64_t WrongItems(const Pool& pool, int threads, int rounds,
                   bool one_step = false) {
  std::atomic<int64_t> wrong{0};
  pool.Together(threads, one_step, [&](Team& team) {
    if (team.num_threads() != std::clamp(threads, 1, pool.num_threads())) {
      ++wrong;
    }
    std::vector<std::atomic<int>> runs(257);
    int before = 0;
    for (int round = 1; round <= rounds; ++round) {
      const Team::Share share =
          round % 2 == 0 ? Team::Share::kRun : Team::Share::kEveryNth;
      for (const int64_t items : {1, 2, 3, 16, 257}) {
        for (auto& r : runs) r.store(0, std::memory_order_relaxed);
        std::atomic<int64_t> done{0};
        team.For(
            items,
            [&](int64_t item, int worker) {
              if (worker < 0 || worker >= team.num_threads()) ++wrong;
              runs[static_cast<size_t>(item)].fetch_add(1);
              done.fetch_add(before == 0 ? 1 : before);
            },
            share);
        const int64_t weight = before == 0 ? 1 : before;
        if (done.load() != items * weight) ++wrong;
        for (size_t i = 0; i < runs.size(); ++i) {
          const int expected = static_cast<int64_t>(i) < items ? 1 : 0;
          if (runs[i].load() != expected) ++wrong;
        }
        // Not atomic: the next step's bodies must see it.
        before = static_cast<int>(items);
      }
    }
  });
  return wrong.load();
}

TEST(Team, EveryItemOfEveryStepRunsOnce) {
  for (const int threads : {1, 2, 3, 4, 16}) {
    const std::unique_ptr<Pool> pool = MakeTbbPool(threads);
    for (int call = 0; call < 20; ++call) {
      for (const int team : {0, 1, 2, threads - 1, threads, threads + 1}) {
        for (const bool one_step : {false, true}) {
          EXPECT_EQ(WrongItems(*pool, team, 5, one_step), 0)
              << team << " of " << threads << " threads, one step " << one_step;
        }
      }
    }
  }
}

// A worker that is alone with the step goes through its own run first, then
// through the others' from the next worker's on.
TEST(Team, ARunIsTakenInOrder) {
  for (const int threads : {2, 3, 16}) {
    for (const int64_t items : {2, 3, 16, 17, 257}) {
      constexpr int64_t kLeader = 1;
      Team team(threads, kLeader);
      std::vector<int64_t> order;
      team.For(
          items, [&](int64_t item, int) { order.push_back(item); },
          Team::Share::kRun);
      ASSERT_EQ(static_cast<int64_t>(order.size()), items);
      for (int64_t i = 0; i < items; ++i) {
        EXPECT_EQ(order[static_cast<size_t>(i)],
                  (kLeader * items / threads + i) % items);
      }
    }
  }
}

TEST(Team, RunsAreOfOneLength) {
  for (const int threads : {1, 2, 3, 16}) {
    const Team team(threads, 0);
    for (const int64_t items : {1, 2, 16, 17, 257}) {
      int64_t end = 0;
      for (int64_t begin = 0; begin < items; begin = end) {
        end = team.RunEnd(begin, items);
        ASSERT_GT(end, begin);
        EXPECT_LE(end - begin, (items + threads - 1) / threads);
        for (int64_t i = begin; i < end; ++i) {
          EXPECT_EQ(team.RunEnd(i, items), end);
        }
      }
      EXPECT_EQ(end, items);
    }
  }
}

TEST(Team, CallersShareAPool) {
  const std::unique_ptr<Pool> pool = MakeTbbPool(3);
  std::vector<std::thread> callers;
  std::atomic<int64_t> wrong{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int call = 0; call < 10; ++call)
        wrong += WrongItems(*pool, 2 + call % 2, 5, call % 3 == 0);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(Team, NothingToDo) {
  const std::unique_ptr<Pool> pool = MakeTbbPool(4);
  for (const bool one_step : {false, true}) {
    pool->Together(pool->num_threads(), one_step, [](Team&) {});
    pool->Together(pool->num_threads(), one_step, [](Team& team) {
      team.For(0, [](int64_t, int) { ADD_FAILURE() << "there is no item"; });
    });
  }
}

TEST(Team, ExceptionsReachTheCallerAndThePoolGoesOn) {
  for (const int threads : {1, 2, 4}) {
    const std::unique_ptr<Pool> pool = MakeTbbPool(threads);
    const auto throwing = [&](bool one_step) {
      pool->Together(pool->num_threads(), one_step, [](Team& team) {
        team.For(100, [](int64_t item, int) {
          if (item == 37) throw std::runtime_error("item 37");
        });
      });
    };
    for (const bool one_step : {false, true}) {
      EXPECT_THROW(throwing(one_step), std::runtime_error);
      EXPECT_EQ(WrongItems(*pool, threads, 2), 0);
    }
  }
}

}  // namespace
}  // namespace fa2::threading
