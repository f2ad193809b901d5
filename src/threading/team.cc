// SPDX-License-Identifier: Apache-2.0
#include "src/threading/team.h"

#include <algorithm>

#include "src/platform/float_environment.h"
#include "src/threading/pool.h"
#include "src/threading/wait.h"

namespace fa2::threading {

Team::Team(int num_threads, int leader, const Pool* pool)
    : num_threads_(num_threads), leader_(leader), pool_(pool) {
  if (num_threads > 1) {
    workers_ = std::make_unique<Worker[]>(static_cast<size_t>(num_threads));
  }
}

void Team::TakeItems(int worker) {
  const Function function = function_;
  const void* const body = body_;
  const bool runs = share_ == Share::kRun;
  const int64_t stride = runs ? 1 : num_threads_;
  for (int64_t i = 0; i < num_threads_; ++i) {
    const int64_t owner = (worker + i) % num_threads_;
    const int64_t first = runs ? RunBegin(owner, items_) : owner;
    const int64_t end = runs ? RunBegin(owner + 1, items_) : items_;
    std::atomic<int64_t>& next = workers_[owner].next;
    for (;;) {
      // Looking does not take the line away from those who still use it.
      if (first + next.load(std::memory_order_relaxed) * stride >= end) break;
      const int64_t item =
          first + next.fetch_add(1, std::memory_order_relaxed) * stride;
      if (item >= end) break;
      try {
        function(body, item, worker);
      } catch (...) {
        if (!failed_.exchange(true)) error_ = std::current_exception();
      }
    }
  }
}

void Team::Help(int worker) {
  std::atomic<int64_t>& mine = workers_[worker].step;
  int64_t done = 0;
  for (Wait wait; !stop_.load(std::memory_order_acquire);) {
    const int64_t step = step_.load(std::memory_order_acquire);
    if (step == 0 || step == done) {
      wait();
      continue;
    }
    // Either the leader sees this, or the step is seen to be over. Exchanges,
    // since qemu 7.2 on x86 lets a load overtake an Arm store before it (stlr,
    // ldar); on x86 a store of this kind is one anyway.
    mine.exchange(step);
    if (step_.load() == step) TakeItems(worker);
    mine.store(0);
    done = step;
    wait = Wait();
  }
}

void Team::TakeItemsOfHelpers() {
  step_.store(++steps_);
  TakeItems(leader_);
  step_.exchange(0);
  for (int w = 0; w < num_threads_; ++w) {
    for (Wait wait; workers_[w].step.load() != 0;) wait();
  }
}

void Team::TakeItemsOfPool() {
  pool_->RunWorkers(
      static_cast<int>(std::min<int64_t>(num_threads_, items_)),
      [](void* team, int worker) {
        const platform::DefaultFloatEnvironment floats;
        static_cast<Team*>(team)->TakeItems(worker);
      },
      this);
  TakeItems(leader_);  // if nobody came
}

void Team::Run(int64_t items, Share share, Function function,
               const void* body) {
  if (items <= 0) return;
  if (num_threads_ == 1 || items == 1) {
    for (int64_t item = 0; item < items; ++item) function(body, item, leader_);
    return;
  }
  for (int w = 0; w < num_threads_; ++w) {
    workers_[w].next.store(0, std::memory_order_relaxed);
  }
  items_ = items;
  share_ = share;
  function_ = function;
  body_ = body;
  if (pool_ == nullptr) {
    TakeItemsOfHelpers();
  } else {
    TakeItemsOfPool();
  }
  if (failed_.exchange(false)) std::rethrow_exception(error_);
}

}  // namespace fa2::threading
