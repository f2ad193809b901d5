// SPDX-License-Identifier: Apache-2.0

// What happens to the process while calls run: it forks, it ends, a signal
// handler interrupts it. Results stay the same bits, nothing hangs.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "fa2/context.h"
#include "tests/support/attention_case.h"
#include "tests/support/fork_trouble.h"
#include "tests/support/output_hash.h"

namespace fa2::test {
namespace {

std::unique_ptr<Context> Make(int threads) {
  ContextOptions options;
  options.num_threads = threads;
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  EXPECT_TRUE(status.ok()) << status.message();
  return context;
}

struct Work {
  AttentionCase c;
  AttentionInputs inputs;
  uint64_t hash = 0;  // of its results on one thread

  explicit Work(uint64_t seed) {
    c.seed = seed;
    c.dtype = seed % 2 == 0 ? DType::kBF16 : DType::kF32;
    c.heads = 4;
    c.kv_heads = 2;
    c.nq = c.nk = 70 + 31 * static_cast<int64_t>(seed % 4);
    c.head_dim = c.value_dim = 32;
    c.causal = Causal::kBottomRight;
    inputs = MakeInputs(c);
    hash = HashOn(Make(1).get());
  }

  // 0 where a call fails.
  uint64_t HashOn(Context* context) const {
    uint64_t result;
    (void)HashOfCall(c, inputs, context, &result);
    return result;
  }
};

const std::vector<Work>& AllWork() {
  static const std::vector<Work>* const all = [] {
    auto* const made = new std::vector<Work>();
    for (uint64_t seed = 0; seed < 8; ++seed) made->emplace_back(seed);
    return made;
  }();
  return *all;
}

// Calls on one context from several threads, until the end of its life. Memory
// is given back again and again, so that it is always being asked for.
class Callers {
 public:
  Callers(Context* context, int threads) {
    for (int t = 0; t < threads; ++t) {
      threads_.emplace_back([this, context, t] {
        for (size_t n = static_cast<size_t>(t); !stop_.load(); ++n) {
          const Work& work = AllWork()[n % AllWork().size()];
          if (work.HashOn(context) != work.hash) ++wrong_;
          ++calls_;
          if (context != nullptr) context->ReleaseWorkspace();
        }
      });
    }
  }
  ~Callers() { Stop(); }

  void Stop() {
    stop_.store(true);
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  void WaitForCalls(int calls) const {
    while (calls_.load() < calls) std::this_thread::yield();
  }
  int wrong() const { return wrong_.load(); }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<int> wrong_{0}, calls_{0};
  std::vector<std::thread> threads_;
};

// How a child ended, in words; empty where it was well.
std::string EndOf(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) return "it cannot be waited for";
  if (WIFSIGNALED(status)) {
    return "signal " + std::to_string(WTERMSIG(status));
  }
  return WEXITSTATUS(status) == 0
             ? ""
             : "exit code " + std::to_string(WEXITSTATUS(status));
}

// Comes first: there is no other thread yet when it forks, so that it may under
// every sanitizer.
TEST(Process, EndsWhileThreadsCompute) {
  if (const char* trouble = ForkTrouble()) GTEST_SKIP() << trouble;
  (void)AllWork();
  for (int n = 0; n < 12; ++n) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);
      // On the default context, which is there as long as the process, and on
      // one of its own, that nobody destroys.
      static Context* const own = Make(3).release();
      static Callers* const callers =
          new Callers(n % 2 == 0 ? own : nullptr, 2);
      (void)callers;
      std::this_thread::sleep_for(std::chrono::milliseconds(5 * (n % 4)));
      std::exit(0);  // destructors of static objects run beside the calls
    }
    EXPECT_EQ(EndOf(child), "") << "child " << n;
  }
}

TEST(Process, EightThreadsOnOneContextAndOnTheirOwn) {
  for (const bool own : {false, true}) {
    const auto shared = Make(3);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        const auto mine = own ? Make(1 + static_cast<int>(t % 3)) : nullptr;
        Context* const context = own ? mine.get() : shared.get();
        for (size_t n = 0; n < 6; ++n) {
          const Work& work = AllWork()[(t + n) % AllWork().size()];
          if (work.HashOn(context) != work.hash) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong.load(), 0);
  }
}

TEST(Process, CallsFromStdAsync) {
  const auto shared = Make(3);
  std::vector<std::future<bool>> calls;
  for (size_t n = 0; n < 16; ++n) {
    const Work& work = AllWork()[n % AllWork().size()];
    calls.push_back(std::async(std::launch::async, [&work, &shared] {
      return work.HashOn(shared.get()) == work.hash &&
             work.HashOn(nullptr) == work.hash;
    }));
  }
  for (auto& call : calls) EXPECT_TRUE(call.get());
}

TEST(Process, ForksWhileThreadsCompute) {
  if (const char* trouble = ForkTroubleBesideThreads()) {
    GTEST_SKIP() << trouble;
  }
  const auto context = Make(2);
  (void)AllWork();
  Callers callers(context.get(), 3);
  callers.WaitForCalls(6);
  for (size_t n = 0; n < 40; ++n) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);  // a child that hangs ends
      const Work& work = AllWork()[n % AllWork().size()];
      const bool good = work.HashOn(context.get()) == work.hash &&
                        work.HashOn(Make(2).get()) == work.hash;
      _exit(good ? 0 : 1);
    }
    EXPECT_EQ(EndOf(child), "") << "child " << n;
    if (HasFailure()) break;
  }
  callers.Stop();
  EXPECT_EQ(callers.wrong(), 0);
}

std::atomic<int> g_signals{0};
volatile double g_sink = 0.0;

// Uses the registers that a call uses.
void OnSignal(int) {
  double sum = 0.0;
  for (int i = 1; i < 50; ++i) sum += 1.0 / i;
  g_sink = sum;
  g_signals.fetch_add(1);
}

TEST(Process, SignalHandlersInterrupt) {
  (void)AllWork();
  struct sigaction action = {}, before = {};
  action.sa_handler = OnSignal;
  // Without SA_RESTART: what waits is woken.
  ASSERT_EQ(sigaction(SIGALRM, &action, &before), 0);
  g_signals.store(0);
  const itimerval often = {{0, 300}, {0, 300}};
  ASSERT_EQ(setitimer(ITIMER_REAL, &often, nullptr), 0);
  int wrong = 0;
  for (const int threads : {1, 3}) {
    const auto context = Make(threads);
    for (int round = 0; round < 3; ++round) {
      for (const Work& work : AllWork()) {
        wrong += work.HashOn(context.get()) != work.hash ? 1 : 0;
      }
    }
  }
  const itimerval never = {};
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(g_signals.load(), 10);
}

}  // namespace
}  // namespace fa2::test
