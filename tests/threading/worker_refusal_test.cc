// SPDX-License-Identifier: Apache-2.0

// The system refuses the threads that oneTBB wants for a second context at
// work: calls under way end, later ones too, and give what they give on one.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fa2/context.h"
#include "tests/support/attention_run.h"
#include "tests/threading/limited_threads.h"

namespace fa2::test {
namespace {

std::unique_ptr<Context> Make(int threads) {
  ContextOptions options;
  options.num_threads = threads;
  options.pool = "tbb";
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  EXPECT_TRUE(status.ok()) << status.message();
  return context;
}

TEST(WorkerRefusal, SeveralContextsGoOnWithoutWorkers) {
  alarm(300);  // a hang fails
  AttentionCase c;
  c.dtype = DType::kF32;
  c.heads = 8;
  c.kv_heads = 8;
  c.nq = c.nk = 150;
  c.head_dim = c.value_dim = 32;
  constexpr int kCallers = 4;
  const std::unique_ptr<Context> one = Make(1);
  std::vector<std::unique_ptr<Context>> contexts;
  for (int i = 0; i < kCallers; ++i) contexts.push_back(Make(2));
  // Two threads are given: from now on a context of two trusts oneTBB.
  ExpectAttention(c, {one.get(), contexts[0].get()});

  std::atomic<bool> begin{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (const auto& context : contexts) {
    callers.emplace_back([&, context = context.get()] {
      while (!begin.load()) std::this_thread::yield();
      for (int call = 0; call < 3; ++call) {
        wrong += static_cast<int>(
            CheckAttention(c, {one.get(), context, context}).size());
      }
    });
  }
  LimitThreads(RunningThreads());
  begin.store(true);
  for (std::thread& caller : callers) caller.join();
  EXPECT_GT(RefusedThreads(), 0);
  EXPECT_EQ(wrong.load(), 0);
  LimitThreadsNoMore();
  for (const auto& context : contexts) {
    ExpectAttention(c, {one.get(), context.get()});
  }
  alarm(0);
}

}  // namespace
}  // namespace fa2::test
