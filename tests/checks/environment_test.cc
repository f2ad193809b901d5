// SPDX-License-Identifier: Apache-2.0

// What contexts take from the environment where their options say nothing, and
// the line that FA2_VERBOSE has each call write.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "fa2/attention.h"
#include "fa2/context.h"
#include "fa2/training_ops.h"
#include "tests/support/attention_case.h"

namespace fa2::test {
namespace {

// For one test; what was there comes back.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    const char* const before = std::getenv(name);
    had_ = before != nullptr;
    if (had_) before_ = before;
    setenv(name, value, 1);
  }
  ~Variable() {
    if (had_) {
      setenv(name_, before_.c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  bool had_;
  std::string before_;
};

Status Make(const ContextOptions& options = {}, ContextInfo* info = nullptr) {
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  if (status.ok() && info != nullptr) *info = context->Info();
  return status;
}

void ExpectWords(const Status& status, const std::string& words) {
  EXPECT_FALSE(status.ok()) << words;
  EXPECT_NE(status.message().find(words), std::string::npos)
      << "no '" << words << "' in: " << status.message();
}

TEST(Environment, NumberOfThreads) {
  {
    const Variable threads("FA2_NUM_THREADS", "3");
    ContextInfo info;
    ASSERT_TRUE(Make({}, &info).ok());
    EXPECT_EQ(info.num_threads, 3);
    // The option goes first.
    ContextOptions options;
    options.num_threads = 2;
    ASSERT_TRUE(Make(options, &info).ok());
    EXPECT_EQ(info.num_threads, 2);
  }
  for (const char* wrong :
       {"0", "-1", "two", "2x", "99999", "99999999999999999999"}) {
    const Variable threads("FA2_NUM_THREADS", wrong);
    ExpectWords(Make(), std::string("FA2_NUM_THREADS is '") + wrong +
                            "'; it must be a number from 1 to");
  }
  ContextOptions options;
  for (const int wrong : {-1, 1 << 30}) {
    options.num_threads = wrong;
    ExpectWords(Make(options), "num_threads is " + std::to_string(wrong));
  }
}

TEST(Environment, NamesThatNothingHas) {
  for (const char* name : {"FA2_MAX_TARGET", "FA2_ENGINE", "FA2_POOL"}) {
    const Variable variable(name, "abacus");
    ExpectWords(Make(), std::string(name) + " is 'abacus'");
  }
  ContextOptions options;
  options.max_target = "abacus";
  ExpectWords(Make(options), "max_target is 'abacus'");
  options = {};
  options.engine = "abacus";
  ExpectWords(Make(options), "engine is 'abacus'");
  options = {};
  options.pool = "abacus";
  ExpectWords(Make(options), "pool is 'abacus'; it must be 'tbb' or 'openmp'");
  options.thread_pool.run = [](void*, int workers, void (*worker)(void*, int),
                               void* argument) {
    for (int n = 0; n < workers; ++n) worker(argument, n);
  };
  ExpectWords(Make(options), "thread_pool is given too");
  ExpectWords(Context::Create({}, nullptr), "context is null");
}

// In a process of its own, since the variable is read once.
[[noreturn]] void CallsThatWrite(const char* verbose) {
  setenv("FA2_VERBOSE", verbose, 1);
  AttentionCase c;
  c.nq = c.nk = 20;
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  bool good = AttentionForward(ForwardArgs(inputs, outputs)).ok() &&
              AttentionBackward(BackwardArgs(c, inputs, outputs)).ok();
  good &= Softmax(inputs.q.view, outputs.dq.view).ok();
  // A call that is refused writes nothing.
  TensorView narrow = outputs.dq.view;
  narrow.sizes[3] = 7;
  good &= !Softmax(inputs.q.view, narrow).ok();
  std::exit(good ? 0 : 1);
}

TEST(EnvironmentDeathTest, VerboseCallsWriteALineEach) {
  // A process of its own would not be emulated.
  if (std::getenv("FA2_UNDER_QEMU") != nullptr) GTEST_SKIP() << "qemu-user";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(CallsThatWrite("1"), testing::ExitedWithCode(0),
              "fa2,attention_forward.*,f32,.*\n"
              "fa2,attention_backward.*,f32,.*\n"
              "fa2,softmax.*,1x1x20x8,f32,.*\n$");
  for (const char* off : {"0", ""}) {
    EXPECT_EXIT(CallsThatWrite(off), testing::ExitedWithCode(0), "^$");
  }
}

}  // namespace
}  // namespace fa2::test
