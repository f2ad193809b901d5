// SPDX-License-Identifier: Apache-2.0

// Calls on every kind of pool: the same bits as on one thread, however many
// threads come and in whatever order, from several callers at once, from
// within a parallel region, and in the child of a fork.
#include "src/threading/pools.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "fa2/context.h"
#include "fa2/training_ops.h"
#include "tests/support/attention_run.h"
#include "tests/support/fork_trouble.h"

namespace fa2::test {
namespace {

using WorkerFunction = void (*)(void* argument, int index);

// Pools of a program: threads, no threads, none who work, half of the work.
void OnThreads(void* calls, int workers, WorkerFunction worker,
               void* argument) {
  if (calls != nullptr) static_cast<std::atomic<int>*>(calls)->fetch_add(1);
  std::vector<std::thread> threads;
  for (int i = 0; i < workers; ++i) threads.emplace_back(worker, argument, i);
  for (std::thread& thread : threads) thread.join();
}
void Backwards(void*, int workers, WorkerFunction worker, void* argument) {
  for (int i = workers - 1; i >= 0; --i) worker(argument, i);
}
void Nobody(void*, int, WorkerFunction, void*) {}
void LastOnly(void*, int workers, WorkerFunction worker, void* argument) {
  std::thread thread(worker, argument, workers - 1);
  thread.join();
}

// The OpenMP runtime under test: the environment names it.
void* OpenMp() {
  static void* const library = [] {
    const char* const name = std::getenv("FA2_TEST_OPENMP");
    return name == nullptr ? nullptr : dlopen(name, RTLD_NOW);
  }();
  return library;
}
template <class Function>
Function* OfOpenMp(const char* name) {
  return reinterpret_cast<Function*>(dlsym(OpenMp(), name));
}
void InParallel(int threads, void (*body)(void*), void* argument) {
  OfOpenMp<void(void (*)(void*), void*, unsigned, unsigned)>("GOMP_parallel")(
      body, argument, static_cast<unsigned>(threads), 0);
}

std::unique_ptr<Context> Make(const ContextOptions& options) {
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  EXPECT_TRUE(status.ok()) << status.message();
  return context;
}

std::unique_ptr<Context> OnPool(const std::string& pool, int threads) {
  ContextOptions options;
  options.num_threads = threads;
  options.pool = pool;
  return Make(options);
}

std::unique_ptr<Context> OnCallers(decltype(ThreadPool::run) run, int threads,
                                   void* opaque = nullptr) {
  ContextOptions options;
  options.num_threads = threads;
  options.thread_pool = {run, opaque};
  return Make(options);
}

// One context for every kind and number of threads.
class AllPools {
 public:
  AllPools() {
    for (const int threads : {1, 3, 16}) {
      Add(OnPool("tbb", threads));
      if (OpenMp() != nullptr) Add(OnPool("openmp", threads));
      for (const auto run : {OnThreads, Backwards, Nobody, LastOnly}) {
        Add(OnCallers(run, threads));
      }
    }
  }
  const std::vector<Context*>& list() const { return list_; }

 private:
  void Add(std::unique_ptr<Context> context) {
    list_.push_back(context.get());
    owned_.push_back(std::move(context));
  }
  std::vector<std::unique_ptr<Context>> owned_;
  std::vector<Context*> list_;
};

std::vector<AttentionCase> Cases() {
  std::vector<AttentionCase> cases;
  // Several blocks either way; half as many where each costs much (sanitizers).
  const int64_t size = CasesOfSixteen() == 16 ? 2 : 1;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    AttentionCase c;
    c.dtype = dtype;
    c.heads = 6;
    c.kv_heads = 2;
    c.nq = 151 * size - 1;
    c.nk = 207 * size - 1;
    c.head_dim = 32;
    c.value_dim = 32;
    c.causal = Causal::kBottomRight;
    cases.push_back(c);
  }
  cases[0].bias = DType::kF32;
  cases[0].want_dbias = true;
  cases[1].batch = 2;
  cases[1].dropout_p = 0.2;
  return cases;
}

TEST(Pools, GiveTheSameBits) {
  const AllPools pools;
  for (const AttentionCase& c : Cases()) {
    // Twice: a pool's first call may go another way than its second.
    ExpectAttention(c, pools.list());
    ExpectAttention(c, pools.list());
  }
}

TEST(Pools, AreNamedInTheInfo) {
  EXPECT_EQ(OnPool("", 2)->Info().pool, "tbb");
  EXPECT_EQ(OnPool("tbb", 2)->Info().pool, "tbb");
  EXPECT_EQ(OnCallers(OnThreads, 5)->Info().pool, "caller");
  EXPECT_EQ(OnCallers(OnThreads, 5)->Info().num_threads, 5);
  std::unique_ptr<Context> context;
  ContextOptions options;
  options.pool = "openmp";
  const bool has_openmp = OpenMp() != nullptr;  // loads the runtime
  const Status openmp = Context::Create(options, &context);
  if (!has_openmp) {
    EXPECT_EQ(openmp.code(), StatusCode::kUnsupported);
    EXPECT_NE(openmp.message().find("no OpenMP runtime"), std::string::npos);
    EXPECT_EQ(context, nullptr);
  } else {
    ASSERT_TRUE(openmp.ok()) << openmp.message();
    EXPECT_EQ(context->Info().pool, "openmp");
  }
  options.pool = "threads";
  EXPECT_EQ(Context::Create(options, &context).code(),
            StatusCode::kInvalidArgument);
  options.pool = "tbb";
  options.thread_pool.run = OnThreads;
  EXPECT_EQ(Context::Create(options, &context).code(),
            StatusCode::kInvalidArgument);
}

TEST(Pools, CallersPoolIsUsed) {
  std::atomic<int> calls{0};
  const auto context = OnCallers(OnThreads, 3, &calls);
  ExpectAttention(Cases()[0], {context.get()});
  EXPECT_GE(calls.load(), 2);
}

TEST(Pools, ServeSeveralCallersAtOnce) {
  const AllPools pools;
  const AttentionCase c = Cases()[0];
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      wrong += static_cast<int>(CheckAttention(c, pools.list()).size());
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(Pools, ServeBodiesThatCallThem) {
  for (const std::string kind : {"tbb", "openmp", "caller"}) {
    if (kind == "openmp" && OpenMp() == nullptr) continue;
    const auto outer =
        kind == "caller" ? OnCallers(OnThreads, 3) : OnPool(kind, 3);
    const AttentionCase c = Cases()[0];
    std::atomic<int> wrong{0};
    // As a framework's parallel loop over heads would call fa2.
    struct Loop {
      const AttentionCase& c;
      Context* context;
      std::atomic<int>& wrong;
    } loop{c, outer.get(), wrong};
    const auto body = [](void* l, int) {
      const Loop& of = *static_cast<Loop*>(l);
      of.wrong += static_cast<int>(CheckAttention(of.c, {of.context}).size());
    };
    OnThreads(nullptr, 4, body, &loop);
    if (kind == "openmp") {
      for (const int threads : {1, 2, 5}) {
        InParallel(
            threads,
            [](void* l) {
              const Loop& of = *static_cast<Loop*>(l);
              of.wrong +=
                  static_cast<int>(CheckAttention(of.c, {of.context}).size());
            },
            &loop);
      }
    }
    EXPECT_EQ(wrong.load(), 0) << kind;
  }
}

TEST(Pools, GoOnWhenTheRuntimeGivesFewerThreads) {
  if (OpenMp() == nullptr) GTEST_SKIP() << "FA2_TEST_OPENMP names no runtime";
  const auto context = OnPool("openmp", 16);
  const auto set_dynamic = OfOpenMp<void(int)>("omp_set_dynamic");
  const auto set_threads = OfOpenMp<void(int)>("omp_set_num_threads");
  for (const AttentionCase& c : Cases()) {
    set_dynamic(1);
    ExpectAttention(c, {context.get()});
    set_dynamic(0);
    for (const int threads : {1, 2, 20, 4}) {
      set_threads(threads);
      ExpectAttention(c, {context.get()});
      // The host's own region between two of fa2's.
      std::atomic<int> entered{0};
      InParallel(
          threads, [](void* n) { ++*static_cast<std::atomic<int>*>(n); },
          &entered);
      EXPECT_GE(entered.load(), 1);
    }
  }
}

TEST(Pools, ServeTheChildOfAFork) {
  if (const char* trouble = ForkTroubleBesideThreads()) {
    GTEST_SKIP() << trouble;
  }
  const AllPools pools;
  const AttentionCase c = Cases()[0];
  const AttentionInputs inputs = MakeInputs(c);
  for (int call = 0; call < 2; ++call) {
    ASSERT_TRUE(CheckAttention(c, inputs, pools.list()).empty());
  }
  if (OpenMp() != nullptr) {
    InParallel(
        4, [](void*) {}, nullptr);
  }
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(300);  // a child that hangs ends
    std::vector<Context*> contexts = pools.list();
    const auto fresh = OnPool(OpenMp() == nullptr ? "tbb" : "openmp", 4);
    contexts.push_back(fresh.get());
    _exit(CheckAttention(c, inputs, contexts).empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(CheckAttention(c, inputs, pools.list()).empty());
}

// Those of this process, where the system tells.
int ThreadsOfProcess() {
  std::error_code error;
  std::filesystem::directory_iterator tasks("/proc/self/task", error);
  if (error) return 0;
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

// Short calls on contexts that live briefly: TBB starts no worker for one while
// those of the last are on their way.
TEST(Pools, ContextsInTurnsShareTheirWorkers) {
  if (ThreadsOfProcess() == 0) GTEST_SKIP() << "no /proc/self/task here";
  const int64_t rows = 20, columns = 1201;
  std::vector<float> x(static_cast<size_t>(rows * columns), 1.0f), y(x.size());
  TensorView in = {x.data(),
                   DType::kF32,
                   {1, 1, rows, columns},
                   {rows * columns, rows * columns, columns, 1}};
  TensorView out = in;
  out.data = y.data();
  const auto call_on = [&](int threads) {
    const auto context = OnPool("tbb", threads);
    for (int call = 0; call < 10; ++call) {
      ASSERT_TRUE(Softmax(in, out, context.get()).ok());
    }
  };
  const int before = ThreadsOfProcess();
  for (int n = 0; n < 100; ++n) {
    for (const int threads : {2, 3, 4}) call_on(threads);
  }
  EXPECT_LE(ThreadsOfProcess(), before + 2 + 3 + 4);
  // More kinds than are kept for later.
  constexpr int kMost = 20, kKept = 8;
  for (int n = 0; n < 10; ++n) {
    for (int threads = 2; threads <= kMost; ++threads) call_on(threads);
  }
  EXPECT_LE(ThreadsOfProcess(),
            before + static_cast<int>(std::thread::hardware_concurrency()) +
                (kKept + 1) * kMost);
}

TEST(Pools, LoopsRunEveryItemOnceAndThrow) {
  using threading::Pool;
  std::vector<std::unique_ptr<Pool>> pools;
  for (const int threads : {1, 3, 16}) {
    pools.push_back(threading::MakeTbbPool(threads));
    if (OpenMp() != nullptr) {
      pools.push_back(threading::MakeOpenMpPool(threads));
    }
    for (const auto run : {OnThreads, Backwards, Nobody, LastOnly}) {
      pools.push_back(threading::MakeCallerPool(threads, {run, nullptr}));
    }
  }
  for (const auto& pool : pools) {
    SCOPED_TRACE(std::string(pool->name()) + ", " +
                 std::to_string(pool->num_threads()));
    for (const int64_t items : {0, 1, 2, 5, 1000}) {
      for (int call = 0; call < 3; ++call) {
        std::vector<std::atomic<int>> runs(static_cast<size_t>(items));
        std::atomic<int> strange{0};
        pool->For(items, [&](int64_t item, int worker) {
          ++runs[static_cast<size_t>(item)];
          if (worker < 0 || worker >= pool->num_threads()) ++strange;
        });
        EXPECT_EQ(strange.load(), 0);
        for (const auto& run : runs) EXPECT_EQ(run.load(), 1);
      }
    }
    EXPECT_THROW(pool->For(100,
                           [](int64_t item, int) {
                             if (item == 42) throw std::runtime_error("42");
                           }),
                 std::runtime_error);
    for (const bool one_step : {false, true}) {
      EXPECT_THROW(pool->Together(16, one_step,
                                  [](threading::Team&) {
                                    throw std::runtime_error("leader");
                                  }),
                   std::runtime_error);
    }
  }
}

}  // namespace
}  // namespace fa2::test
