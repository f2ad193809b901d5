// SPDX-License-Identifier: Apache-2.0

// The system refuses the threads that oneTBB wants for further contexts at
// work: calls under way end, later ones too, and give what they give on one.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fa2/attention.h"
#include "fa2/context.h"
#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"
#include "tests/support/hang_alarm.h"
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

AttentionCase Case() {
  AttentionCase c;
  c.dtype = DType::kF32;
  c.heads = 8;
  c.kv_heads = 8;
  c.nq = c.nk = 150;
  c.head_dim = c.value_dim = 32;
  return c;
}

// Four callers at once, each on a context of its own, while no thread is given;
// then each context once more.
void ExpectFourContextsGoOn(const std::vector<std::unique_ptr<Context>>& four) {
  const AttentionCase c = Case();
  const std::unique_ptr<Context> one = Make(1);
  std::atomic<bool> begin{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (const auto& context : four) {
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
  for (const auto& context : four) {
    ExpectAttention(c, {one.get(), context.get()});
  }
}

// Calls until oneTBB has as many workers as a context wants.
void StartWorkers(Context* context) {
  const int wanted = context->Info().num_threads - 1;
  const AttentionCase c = Case();
  for (int call = 0; call < 1000 && RunningThreads() < wanted; ++call) {
    ExpectAttention(c, {context});
  }
  ASSERT_EQ(RunningThreads(), wanted);
}

// All were given their threads once, and trust oneTBB, which has started one.
TEST(WorkerRefusal, CallersThatStartWorkers) {
  SetHangAlarm();
  const AttentionCase c = Case();
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  std::vector<std::unique_ptr<Context>> four;
  for (int i = 0; i < 4; ++i) {
    four.push_back(Make(2));
    ASSERT_TRUE(
        AttentionForward(ForwardArgs(inputs, outputs), four[i].get()).ok());
  }
  StartWorkers(four[0].get());
  ExpectFourContextsGoOn(four);
  alarm(0);
}

// One was, and oneTBB has started its workers. Workers that start others would
// end the process.
TEST(WorkerRefusal, WorkersThatStartWorkers) {
  alarm(300);
  std::vector<std::unique_ptr<Context>> four;
  for (int i = 0; i < 4; ++i) four.push_back(Make(8));
  StartWorkers(four[0].get());
  ExpectFourContextsGoOn(four);
  alarm(0);
}

}  // namespace
}  // namespace fa2::test
