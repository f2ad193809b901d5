// SPDX-License-Identifier: Apache-2.0

// Random calls whose tensors and workspace end, or begin, where no page is
// mapped, and whose inputs lie on pages that nobody may write: a byte read or
// written outside ends the process. FA2_TEST_CASES=n runs n cases of each kind,
// FA2_TEST_SEED=n case n alone.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/attention_run.h"
#include "tests/support/buffer.h"
#include "tests/support/case_generator.h"

namespace fa2::test {
namespace {

// Workspace in Buffers. Its sizes are multiples of its alignment.
class EdgeAllocator {
 public:
  Allocator functions() { return {Allocate, Release, this}; }

 private:
  static void* Allocate(void* opaque, size_t bytes, size_t alignment) {
    auto buffer = std::make_unique<Buffer>(bytes, alignment);
    uint8_t* const data = buffer->data();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % alignment, 0u);
    auto* const self = static_cast<EdgeAllocator*>(opaque);
    const std::lock_guard<std::mutex> lock(self->mutex_);
    self->buffers_[data] = std::move(buffer);
    return data;
  }
  static void Release(void* opaque, void* memory, size_t /*bytes*/) {
    auto* const self = static_cast<EdgeAllocator*>(opaque);
    const std::lock_guard<std::mutex> lock(self->mutex_);
    self->buffers_.erase(memory);
  }

  std::mutex mutex_;
  std::map<void*, std::unique_ptr<Buffer>> buffers_;
};

// The case under way, for the last words of the process.
volatile uint64_t g_seed = 0;

void SayCaseAndEnd(int signal) {
  char text[64];
  const int length = std::snprintf(text, sizeof(text),
                                   "outside a tensor: FA2_TEST_SEED=%llu\n",
                                   static_cast<unsigned long long>(g_seed));
  (void)!write(STDERR_FILENO, text, static_cast<size_t>(length));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

uint64_t CasesOf(uint64_t all) {
  if (const char* cases = std::getenv("FA2_TEST_CASES")) {
    return std::stoull(cases);
  }
  return all * static_cast<uint64_t>(CasesOfSixteen()) / 16;
}

void RunCases(Placement placement, uint64_t first_seed, uint64_t cases,
              const CaseOptions& options) {
  const PlacementOfBuffers placed(placement);
  std::signal(SIGSEGV, SayCaseAndEnd);
  EdgeAllocator allocator;
  ContextOptions context_options;
  context_options.num_threads = 2;
  context_options.allocator = allocator.functions();
  std::unique_ptr<Context> context;
  ASSERT_TRUE(Context::Create(context_options, &context).ok());
  if (const char* seed = std::getenv("FA2_TEST_SEED")) {
    first_seed = std::stoull(seed);
    cases = 1;
  }
  for (uint64_t n = 0; n < cases && !testing::Test::HasFailure(); ++n) {
    const AttentionCase c = RandomCase(first_seed + n, options);
    g_seed = first_seed + n;
    ExpectAttention(c, {context.get()});
    // Of the size that the next call needs, so that it too ends at the edge.
    context->ReleaseWorkspace();
  }
  std::signal(SIGSEGV, SIG_DFL);
}

TEST(AttentionPageEdge, SmallCallsAtTheEnd) {
  RunCases(Placement::kEndsAtPage, 4000000, CasesOf(96), CaseOptions());
}
TEST(AttentionPageEdge, SmallCallsAtTheBeginning) {
  RunCases(Placement::kBeginsAtPage, 5000000, CasesOf(96), CaseOptions());
}
TEST(AttentionPageEdge, SeveralBlocks) {
  CaseOptions options;
  options.large = true;
  RunCases(Placement::kEndsAtPage, 6000000, CasesOf(4), options);
  RunCases(Placement::kBeginsAtPage, 7000000, CasesOf(4), options);
}

// Keys of bf16 that fill whole panels, which the forward on AMX takes as they
// lie, and which do not.
TEST(AttentionPageEdge, KeysOfWholePanels) {
  for (const Placement placement :
       {Placement::kEndsAtPage, Placement::kBeginsAtPage}) {
    const PlacementOfBuffers placed(placement);
    const Contexts contexts({1, 3});
    for (const int64_t nk : {32, 288, 80}) {
      for (const int64_t head_dim : {32, 96, 160, 128}) {
        if (CasesOfSixteen() < 16 && head_dim > 96) continue;
        for (const int option : {0, 1, 2, 3, 4}) {
          AttentionCase c;
          c.dtype = DType::kBF16;
          c.batch = 2;
          c.heads = 4;
          c.kv_heads = option <= 1 ? 4 : 2;
          c.nq = option == 1 ? 128 : 37;
          c.nk = nk;
          c.head_dim = head_dim;
          c.value_dim = 40;
          if (option == 1) c.causal = Causal::kBottomRight;
          if (option == 2) c.alibi = true;
          if (option == 3) {
            c.bias = DType::kBF16;
            c.bias_masked = 0.3;
          }
          if (option == 4) {
            c.batch = 1;
            c.lengths_q = {33, 0, 5, 20};
            c.lengths_k = {nk, 32, 0, 64};
          }
          ExpectAttention(c, contexts.list());
        }
      }
    }
  }
}

// What ALiBi keeps of each head's rows, where slopes are so steep that it looks
// at it: more sequences than heads, more heads than sequences, packed ones.
TEST(AttentionPageEdge, SteepSlopes) {
  for (const Placement placement :
       {Placement::kEndsAtPage, Placement::kBeginsAtPage}) {
    const PlacementOfBuffers placed(placement);
    EdgeAllocator allocator;
    for (const DType dtype :
         {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
      for (const int shape : {0, 1, 2}) {
        ContextOptions options;
        options.num_threads = 1 + shape;
        options.allocator = allocator.functions();
        std::unique_ptr<Context> context;
        ASSERT_TRUE(Context::Create(options, &context).ok());
        AttentionCase c;
        c.dtype = dtype;
        c.batch = shape == 0 ? 5 : 1;
        c.kv_heads = shape == 1 ? 3 : 1;
        c.heads = 2 * c.kv_heads;
        c.nq = 129;
        c.nk = 257;
        if (shape == 2) {
          c.lengths_q = {33, 0, 129, 95};
          c.lengths_k = {161, 17, 257, 95};
        }
        c.head_dim = c.value_dim = 32;
        c.alibi = c.want_dalibi = true;
        const AttentionInputs inputs = MakeInputs(
            c, [](AttentionInputs* in) { Fill(in->alibi_slopes.view, 1.0); });
        ExpectAttention(c, inputs, {context.get()});
      }
    }
  }
}

}  // namespace
}  // namespace fa2::test
