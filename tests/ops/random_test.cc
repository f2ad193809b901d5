// SPDX-License-Identifier: Apache-2.0

// Random calls of the training kernels, on every target: against float64, with
// the same bits on several numbers of threads; and with all tensors at a page's
// edge. FA2_TEST_SEED=n runs case n alone, FA2_TEST_CASES=n n of them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/buffer.h"
#include "tests/support/op_case.h"

namespace fa2::test {
namespace {

std::unique_ptr<Context> Make(const std::string& target, int threads) {
  ContextOptions options;
  options.max_target = target;
  options.num_threads = threads;
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  EXPECT_TRUE(status.ok()) << status.message();
  return context;
}

void RunCases(Placement placement, uint64_t first, uint64_t cases,
              const std::vector<int>& threads) {
  if (const char* seed = std::getenv("FA2_TEST_SEED")) {
    first = std::stoull(seed);
    cases = 1;
  } else if (const char* number = std::getenv("FA2_TEST_CASES")) {
    cases = std::stoull(number);
  } else if (std::getenv("FA2_TEST_FEW_CASES") != nullptr) {
    cases /= 4;
  }
  const PlacementOfBuffers placed(placement);
  const std::vector<std::string> targets = Make("", 1)->Info().targets;
  std::vector<std::unique_ptr<Context>> owned;
  for (const std::string& target : targets) {
    for (const int n : threads) owned.push_back(Make(target, n));
  }
  for (uint64_t seed = first; seed < first + cases; ++seed) {
    const OpCase c = RandomOpCase(seed);
    auto context = owned.begin();
    for (const std::string& target : targets) {
      SCOPED_TRACE(target + ", FA2_TEST_SEED=" + std::to_string(seed));
      std::vector<Context*> contexts;
      for (size_t n = 0; n < threads.size(); ++n) {
        contexts.push_back((context++)->get());
      }
      for (const std::string& failure : CheckOp(c, contexts)) {
        ADD_FAILURE() << c.text << ": " << failure;
      }
    }
    if (testing::Test::HasFailure()) return;
  }
}

TEST(OpsRandom, AgainstFloat64) {
  RunCases(Placement::kAnywhere, 0, 40 * kOps, {1, 2, 3});
}
TEST(OpsRandom, AtTheEndOfAPage) {
  RunCases(Placement::kEndsAtPage, 100000, 30 * kOps, {2});
}
TEST(OpsRandom, AtTheBeginningOfAPage) {
  RunCases(Placement::kBeginsAtPage, 200000, 30 * kOps, {2});
}

// The checker: it fails calls that are off by little more than the bound, that
// leave an output out, write beside one, or fail.
TEST(OpsRandom, WrongCallsFail) {
  const auto context = Make("", 1);
  int calls = 0;
  for (uint64_t seed = 300000; seed < 300000 + 10 * kOps; ++seed) {
    const OpCase c = RandomOpCase(seed);
    if (c.outputs.empty()) continue;
    const OpOutput& o = c.outputs.back();
    if (Elements(o.actual.view.sizes) == 0) continue;
    ++calls;
    const auto expect_failure = [&](const std::function<void()>& spoil) {
      OpCase wrong = c;
      wrong.run = [&](Context* on) {
        const Status status = c.run(on);
        spoil();
        return status;
      };
      EXPECT_FALSE(CheckOp(wrong, {context.get()}).empty()) << c.text;
    };
    const double value = Get(o.value.view, {0, 0, 0, 0});
    expect_failure([&] {
      const double much = 1.5 * Get(o.bound.view, {0, 0, 0, 0});
      Set(o.actual.view, {0, 0, 0, 0}, value * 1.02 + much + 1e-6);
    });
    expect_failure([&] { Set(o.actual.view, {0, 0, 0, 0}, NAN); });
    expect_failure([&] { o.actual.buffer->data()[-1] = 0; });
    OpCase refused = c;
    refused.run = [](Context*) { return Status::Unsupported("no"); };
    EXPECT_FALSE(CheckOp(refused, {context.get()}).empty());
    EXPECT_TRUE(CheckOp(c, {context.get()}).empty()) << c.text;
  }
  EXPECT_GT(calls, 5 * kOps);
}

}  // namespace
}  // namespace fa2::test
