// SPDX-License-Identifier: Apache-2.0

// The n-th allocation of the process fails, alone or with all after it, for
// every n of a call, on one thread and on two: the call says so and has written
// nothing, or has done without; the next call is right; no call leaves memory
// behind; nothing hangs.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fa2/fa2.h"
#include "tests/faults/failing_malloc.h"
#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"
#include "tests/support/case_generator.h"
#include "tests/support/hang_alarm.h"
#include "tests/support/op_case.h"

namespace fa2::test {
namespace {

// A call, and the buffers that it writes.
struct Call {
  std::string text;
  std::vector<std::shared_ptr<Buffer>> outputs;
  std::function<Status(Context*)> run;
};

using Contents = std::vector<std::vector<uint8_t>>;

Contents ContentsOf(const Call& call) {
  Contents all;
  for (const auto& buffer : call.outputs) all.push_back(buffer->Contents());
  return all;
}

void Restore(const Call& call) {
  for (const auto& buffer : call.outputs) buffer->Restore();
}

std::unique_ptr<Context> Make(int threads) {
  ContextOptions options;
  options.num_threads = threads;
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  EXPECT_TRUE(status.ok()) << status.message();
  return context;
}

struct Outcome {
  int64_t refused = 0;  // calls that returned a status
  int64_t done_without = 0;
};

// One pass over all n. Threads and contexts are new each time: nothing is left
// from an earlier call that this one would have to ask for.
Outcome Sweep(const Call& call, int threads, Failing failing) {
  const Contents before = ContentsOf(call);
  const std::unique_ptr<Context> one = Make(1);
  EXPECT_TRUE(call.run(one.get()).ok());
  const Contents expected = ContentsOf(call);
  Outcome outcome;
  for (int64_t n = 0; !testing::Test::HasFailure(); ++n) {
    Restore(call);
    const std::unique_ptr<Context> context = Make(threads);
    Status status;
    int64_t failed = 0;
    std::thread([&] {
      FailAllocation(n, failing);
      status = call.run(context.get());
      failed = StopFailing();
    }).join();
    SCOPED_TRACE(call.text + ", " + std::to_string(threads) +
                 " threads, allocation " + std::to_string(n));
    if (status.ok()) {
      EXPECT_TRUE(ContentsOf(call) == expected) << "wrong results";
      if (failed == 0) break;
      ++outcome.done_without;
    } else {
      ++outcome.refused;
      EXPECT_EQ(status.code(), StatusCode::kOutOfMemory) << status.message();
      EXPECT_FALSE(status.message().empty());
      EXPECT_TRUE(ContentsOf(call) == before)
          << "written in spite of: " << status.message();
    }
    Restore(call);
    EXPECT_TRUE(call.run(context.get()).ok());
    EXPECT_TRUE(ContentsOf(call) == expected) << "the next call is wrong";
  }
  Restore(call);
  return outcome;
}

// Allocations of what a call that goes on without oneTBB leaves behind, since
// oneTBB waits for it ever after: TbbPool's call and its arena.
constexpr int64_t kLeftBehind = 2;

// Adds up what happened.
void ExpectSurvives(const Call& call, Outcome* total) {
  SetHangAlarm();
  for (const auto& buffer : call.outputs) buffer->Snapshot();
  for (const int threads : {1, 2}) {
    for (const Failing failing : {Failing::kOne, Failing::kAllFrom}) {
      // oneTBB keeps memory at times, but a leak is there in every sweep.
      int64_t least = std::numeric_limits<int64_t>::max();
      for (int sweep = 0; sweep < 60 && least > 0; ++sweep) {
        const int64_t live = LiveAllocations();
        const Outcome outcome = Sweep(call, threads, failing);
        if (testing::Test::HasFailure()) return;
        // A worker of oneTBB gives back what it held when it next runs.
        for (int ms = 0; ms < 50 && LiveAllocations() > live; ++ms) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        const int64_t allowed =
            threads > 1 ? kLeftBehind * outcome.done_without : 0;
        least = std::min(least, LiveAllocations() - live - allowed);
        total->refused += outcome.refused;
        total->done_without += outcome.done_without;
      }
      EXPECT_LE(least, 0) << call.text << ", " << threads
                          << " threads: memory is left behind";
    }
  }
  alarm(0);
}

void ExpectBoth(const Outcome& total) {
  EXPECT_GT(total.refused, 0);
  EXPECT_GT(total.done_without, 0);
  std::cout << total.refused << " calls refused, " << total.done_without
            << " done without the memory\n";
}

std::vector<std::shared_ptr<Buffer>> BuffersOf(
    const std::vector<const Tensor*>& tensors) {
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (const Tensor* t : tensors) {
    if (t->given()) buffers.push_back(t->buffer);
  }
  return buffers;
}

// Seeds of cases with, together, every option; two of them where few cases are
// run.
std::vector<uint64_t> Seeds() {
  if (CasesOfSixteen() <= 2) return {12, 15};
  return {11, 12, 13, 14, 15, 16, 17, 18};
}

AttentionCase CaseOf(uint64_t seed) {
  CaseOptions options;
  options.large = seed % 4 == 0;  // work for two threads
  AttentionCase c = RandomCase(seed, options);
  c.packing = Packing::kNone;  // a buffer an output
  return c;
}

TEST(AllocationFaults, Forward) {
  Outcome total;
  for (const uint64_t seed : Seeds()) {
    const AttentionCase c = CaseOf(seed);
    const AttentionInputs inputs = MakeInputs(c);
    const AttentionOutputs o = MakeOutputs(c, inputs);
    ExpectSurvives({"forward " + Describe(c), BuffersOf({&o.out, &o.lse}),
                    [&](Context* context) {
                      return AttentionForward(ForwardArgs(inputs, o), context);
                    }},
                   &total);
    if (HasFailure()) return;
  }
  ExpectBoth(total);
}

TEST(AllocationFaults, Backward) {
  Outcome total;
  for (const uint64_t seed : Seeds()) {
    const AttentionCase c = CaseOf(seed);
    const AttentionInputs inputs = MakeInputs(c);
    const AttentionOutputs o = MakeOutputs(c, inputs);
    ExpectSurvives(
        {"backward " + Describe(c),
         BuffersOf({&o.dq, &o.dk, &o.dv, &o.dbias, &o.dalibi, &o.dsinks}),
         [&](Context* context) {
           return AttentionBackward(BackwardArgs(c, inputs, o), context);
         }},
        &total);
    if (HasFailure()) return;
  }
  ExpectBoth(total);
}

TEST(AllocationFaults, TrainingKernels) {
  Outcome total;
  const uint64_t rounds = CasesOfSixteen() <= 2 ? 1 : 4;
  for (uint64_t seed = 400000; seed < 400000 + rounds * kOps; ++seed) {
    const OpCase c = RandomOpCase(seed);
    Call call{c.text, {}, c.run};
    for (const OpOutput& o : c.outputs) {
      call.outputs.push_back(o.actual.buffer);
    }
    ExpectSurvives(call, &total);
    if (HasFailure()) return;
  }
  ExpectBoth(total);
}

}  // namespace
}  // namespace fa2::test
