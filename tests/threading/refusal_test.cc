// SPDX-License-Identifier: Apache-2.0

// The system refuses threads: calls run on fewer, on every pool, and give what
// they give on one.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fa2/context.h"
#include "fa2/training_ops.h"
#include "tests/support/attention_run.h"
#include "tests/support/hang_alarm.h"
#include "tests/support/tensor.h"
#include "tests/threading/limited_threads.h"

namespace fa2::test {
namespace {

// On the OpenMP runtime that the environment names, else on oneTBB: a process
// has threads of one, which else were there when the other is refused any.
class Refusal : public testing::Test {
 protected:
  void SetUp() override {
    const char* const openmp = std::getenv("FA2_TEST_OPENMP");
    if (openmp != nullptr) {
      if (dlopen(openmp, RTLD_NOW) == nullptr) GTEST_SKIP() << dlerror();
      pool_ = "openmp";
    }
    SetHangAlarm();
  }
  void TearDown() override {
    alarm(0);
    LimitThreadsNoMore();
  }

  std::unique_ptr<Context> Make(int threads) const {
    ContextOptions options;
    options.num_threads = threads;
    options.pool = pool_;
    std::unique_ptr<Context> context;
    const Status status = Context::Create(options, &context);
    EXPECT_TRUE(status.ok()) << status.message();
    return context;
  }

 private:
  std::string pool_ = "tbb";
};

// Each training kernel once: on Pool::For, twice in one call some of them.
void ExpectTrainingOps(Context* context) {
  constexpr int64_t kRows = 300, kColumns = 700;
  const Sizes sizes = {1, 1, kRows, kColumns};
  const Tensor x = MakeTensor(DType::kF32, sizes);
  Random random(1);
  FillNormal(x.view, random);
  const auto bytes = [](const Tensor& t) {
    const auto* const data = static_cast<const char*>(t.view.data);
    return std::string(data, kRows * kColumns * sizeof(float));
  };
  const std::unique_ptr<Context> alone = [] {
    ContextOptions options;
    options.num_threads = 1;
    std::unique_ptr<Context> made;
    EXPECT_TRUE(Context::Create(options, &made).ok());
    return made;
  }();
  std::vector<std::string> results[2];
  for (Context* const on : {alone.get(), context}) {
    std::vector<std::string>& result = results[on == context];
    const Tensor y = MakeTensor(DType::kF32, sizes);
    const Tensor ids = MakeTensor(DType::kI64, {1, 1, 1, kRows});
    for (int64_t i = 0; i < kRows; ++i) {
      static_cast<int64_t*>(ids.view.data)[i] = i * i % kRows;
    }
    EXPECT_TRUE(Softmax(x.view, y.view, on).ok());
    result.push_back(bytes(y));
    CrossEntropyArgs loss;
    loss.logits = x.view;
    loss.targets = ids.view;
    loss.dlogits = y.view;
    EXPECT_TRUE(CrossEntropy(loss, on).ok());
    result.push_back(bytes(y));
    EmbeddingBackwardArgs embedding;
    embedding.dy = x.view;
    embedding.ids = ids.view;
    embedding.dweight = y.view;
    embedding.accumulate_dweight = false;
    EXPECT_TRUE(EmbeddingBackward(embedding, on).ok());
    result.push_back(bytes(y));
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST_F(Refusal, CallsRunOnFewerThreads) {
  AttentionCase c;
  c.dtype = DType::kBF16;
  c.heads = 4;
  c.kv_heads = 2;
  c.nq = c.nk = 200;
  c.head_dim = c.value_dim = 32;
  const AttentionInputs inputs = MakeInputs(c);
  const std::unique_ptr<Context> one = Make(1);
  for (const int limit : {0, 1, 3, 8}) {
    for (const int threads : {2, 16}) {
      SCOPED_TRACE(std::to_string(limit) + " threads given of " +
                   std::to_string(threads));
      const std::unique_ptr<Context> context = Make(threads);
      LimitThreads(limit);
      for (int call = 0; call < 3; ++call) {
        ExpectAttention(c, inputs, {one.get(), context.get()});
        ExpectTrainingOps(context.get());
      }
      if (limit == 0) {
        EXPECT_GT(RefusedThreads(), 0);
      }
      LimitThreadsNoMore();
    }
  }
  // From a thread of its own, which has no pool yet.
  LimitThreadsNoMore();
  std::thread([&] {
    LimitThreads(1);
    const std::unique_ptr<Context> context = Make(16);
    for (int call = 0; call < 3; ++call) {
      ExpectAttention(c, inputs, {context.get()});
    }
  }).join();
  LimitThreadsNoMore();
  const std::unique_ptr<Context> context = Make(16);
  for (int call = 0; call < 3; ++call) {
    ExpectAttention(c, inputs, {context.get()});
    ExpectTrainingOps(context.get());
  }
}

}  // namespace
}  // namespace fa2::test
