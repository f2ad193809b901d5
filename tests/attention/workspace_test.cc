// SPDX-License-Identifier: Apache-2.0

// The memory that a call takes: kept for the next one, known in advance, in
// proportion to the inputs, limited and refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "fa2/attention.h"
#include "tests/support/attention_case.h"
#include "tests/support/attention_check.h"
#include "tests/support/attention_run.h"

namespace fa2::test {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16,
                            DType::kF64};

// Grouped heads, tails of both kinds.
AttentionCase SmallCase(DType dtype) {
  AttentionCase c;
  c.dtype = dtype;
  c.heads = 4;
  c.kv_heads = 2;
  c.nq = 130;
  c.nk = 97;
  c.head_dim = 64;
  c.value_dim = 48;
  return c;
}

// Bytes that a forward and a backward want.
struct Bytes {
  size_t forward = 0, backward = 0;
};

Bytes WorkspaceOf(const AttentionCase& c, const AttentionInputs& inputs,
                  const AttentionOutputs& outputs, Context* context) {
  Bytes bytes;
  Status status = AttentionForwardWorkspace(ForwardArgs(inputs, outputs),
                                            &bytes.forward, context);
  EXPECT_TRUE(status.ok()) << status.message();
  status = AttentionBackwardWorkspace(BackwardArgs(c, inputs, outputs),
                                      &bytes.backward, context);
  EXPECT_TRUE(status.ok()) << status.message();
  return bytes;
}

TEST(AttentionWorkspace, SecondCallAllocatesNothing) {
  const Contexts contexts({2});
  Context* const context = contexts.list()[0];
  for (const DType dtype : kTypes) {
    const AttentionCase c = SmallCase(dtype);
    const AttentionInputs inputs = MakeInputs(c);
    const AttentionOutputs outputs = MakeOutputs(c, inputs);
    const auto run = [&] {
      EXPECT_TRUE(AttentionForward(ForwardArgs(inputs, outputs), context).ok());
      EXPECT_TRUE(
          AttentionBackward(BackwardArgs(c, inputs, outputs), context).ok());
    };
    run();
    const size_t count = context->AllocationCount();
    const size_t bytes = context->WorkspaceBytes();
    run();
    EXPECT_EQ(context->AllocationCount(), count) << NameOf(dtype);
    EXPECT_EQ(context->WorkspaceBytes(), bytes) << NameOf(dtype);
  }
  context->ReleaseWorkspace();
  EXPECT_EQ(context->WorkspaceBytes(), 0u);
}

TEST(AttentionWorkspace, IsWhatTheQuerySays) {
  for (const DType dtype : kTypes) {
    const Contexts contexts({2});
    Context* const context = contexts.list()[0];
    const AttentionCase c = SmallCase(dtype);
    const AttentionInputs inputs = MakeInputs(c);
    const AttentionOutputs outputs = MakeOutputs(c, inputs);
    const Bytes bytes = WorkspaceOf(c, inputs, outputs, context);
    ASSERT_TRUE(AttentionForward(ForwardArgs(inputs, outputs), context).ok());
    ASSERT_TRUE(
        AttentionBackward(BackwardArgs(c, inputs, outputs), context).ok());
    EXPECT_LE(context->PeakWorkspaceBytes(), bytes.forward + bytes.backward);
    EXPECT_GE(context->PeakWorkspaceBytes(),
              std::max(bytes.forward, bytes.backward));
  }
}

// What threads need of their own is bounded by what there is to do.
TEST(AttentionWorkspace, FollowsTheInputsNotTheThreads) {
  const Contexts contexts({1, 64});
  for (const int64_t heads : {1, 4}) {
    for (const int64_t rows : {256, 1024}) {
      AttentionCase c;
      c.dtype = DType::kBF16;
      c.heads = c.kv_heads = heads;
      c.nq = c.nk = rows;
      c.head_dim = c.value_dim = 64;
      const AttentionInputs inputs = MakeInputs(c);
      const AttentionOutputs outputs = MakeOutputs(c, inputs);
      // Bytes of Q, K, V and dO.
      const size_t read =
          static_cast<size_t>(4 * 2 * heads * rows * c.head_dim);
      for (Context* context : contexts.list()) {
        const Bytes bytes = WorkspaceOf(c, inputs, outputs, context);
        EXPECT_LE(bytes.forward, 4 * read) << heads << " heads of " << rows;
        EXPECT_LE(bytes.backward, 10 * read) << heads << " heads of " << rows;
      }
    }
  }
}

// One thread goes through heads and sequences one by one, in the same memory.
TEST(AttentionWorkspace, DoesNotGrowWithTheBatchOnOneThread) {
  const Contexts contexts({1});
  AttentionCase c;
  c.dtype = DType::kBF16;
  c.nq = c.nk = 128;
  c.head_dim = c.value_dim = 64;
  // So many that blocks are not cut smaller to make items.
  c.heads = c.kv_heads = 8;
  Bytes bytes[2];
  for (const int many : {0, 1}) {
    c.batch = many == 0 ? 8 : 16;
    const AttentionInputs inputs = MakeInputs(c);
    const AttentionOutputs outputs = MakeOutputs(c, inputs);
    bytes[many] = WorkspaceOf(c, inputs, outputs, contexts.list()[0]);
  }
  // Flags of blocks are all that is kept of every head.
  EXPECT_LE(bytes[1].forward, bytes[0].forward + 4096);
  EXPECT_LE(bytes[1].backward, bytes[0].backward + 4096);
}

// Bytes of workspace that an option adds to a call are bounded by what it
// keeps: rows' statistics, a block's scores.
TEST(AttentionWorkspace, OptionsTakeWhatTheyKeep) {
  const Contexts contexts({1});
  const auto bytes_of = [&](const AttentionCase& c) {
    const AttentionInputs inputs = MakeInputs(c);
    return WorkspaceOf(c, inputs, MakeOutputs(c, inputs), contexts.list()[0]);
  };
  AttentionCase plain;
  plain.dtype = DType::kBF16;
  plain.heads = plain.kv_heads = 4;
  plain.nq = plain.nk = 320;
  plain.head_dim = plain.value_dim = 64;
  Bytes least = bytes_of(plain);
  const auto expect = [&](const char* option, const AttentionCase& c,
                          size_t forward, size_t backward) {
    const Bytes bytes = bytes_of(c);
    EXPECT_LE(bytes.forward, least.forward + forward) << option;
    EXPECT_LE(bytes.backward, least.backward + backward) << option;
  };
  AttentionCase c = plain;
  c.alibi = true;
  expect("alibi", c, 4 << 10, 4 << 10);
  c = plain;
  c.bias = DType::kF32;
  expect("bias", c, 80 << 10, 48 << 10);
  c.bias_broadcast = {true, false, false, false};
  expect("shared bias", c, 80 << 10, 48 << 10);
  c = plain;
  c.bias = DType::kBool;
  expect("mask", c, 80 << 10, 48 << 10);
  c = plain;
  c.dropout_p = 0.5;
  expect("dropout", c, 80 << 10, 48 << 10);
  // A bias that is staged for other sequences to come is kept, of one not.
  plain.nq = plain.nk = 128;
  least = bytes_of(plain);
  c = plain;
  c.bias = DType::kF32;
  expect("short bias", c, 48 << 10, 96 << 10);
}

void ExpectOutOfMemory(const ContextOptions& options) {
  std::unique_ptr<Context> context;
  const Status made = Context::Create(options, &context);
  ASSERT_TRUE(made.ok()) << made.message();
  const AttentionCase c = SmallCase(DType::kF32);
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  for (const Tensor* t :
       {&outputs.out, &outputs.dq, &outputs.dk, &outputs.dv}) {
    t->buffer->Snapshot();
  }
  Status status = AttentionForward(ForwardArgs(inputs, outputs), context.get());
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory) << status.message();
  EXPECT_FALSE(status.message().empty());
  status = AttentionBackward(BackwardArgs(c, inputs, outputs), context.get());
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory) << status.message();
  for (const Tensor* t :
       {&outputs.out, &outputs.dq, &outputs.dk, &outputs.dv}) {
    EXPECT_FALSE(t->buffer->ChangedOutside({}));
  }
}

TEST(AttentionWorkspace, MemoryLimitIsKept) {
  ContextOptions options;
  options.memory_limit = 1;
  ExpectOutOfMemory(options);
}

TEST(AttentionWorkspace, RefusedAllocationIsAnError) {
  ContextOptions options;
  options.allocator.allocate = [](void*, size_t, size_t) -> void* {
    return nullptr;
  };
  options.allocator.release = [](void*, void*, size_t) {};
  ExpectOutOfMemory(options);
}

TEST(AttentionWorkspace, OwnAllocatorIsUsedAndGetsAllBack) {
  struct Count {
    int64_t bytes = 0;
    int64_t calls = 0;
  } count;
  {
    ContextOptions options;
    options.num_threads = 2;
    options.allocator.opaque = &count;
    options.allocator.allocate = [](void* opaque, size_t bytes,
                                    size_t alignment) {
      auto* const c = static_cast<Count*>(opaque);
      c->bytes += static_cast<int64_t>(bytes);
      ++c->calls;
      return std::aligned_alloc(
          alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    options.allocator.release = [](void* opaque, void* memory, size_t bytes) {
      static_cast<Count*>(opaque)->bytes -= static_cast<int64_t>(bytes);
      std::free(memory);
    };
    std::unique_ptr<Context> context;
    ASSERT_TRUE(Context::Create(options, &context).ok());
    const AttentionCase c = SmallCase(DType::kBF16);
    ExpectAttention(c, {context.get()});
    EXPECT_GT(count.calls, 0);
    EXPECT_EQ(count.bytes, static_cast<int64_t>(context->WorkspaceBytes()));
  }
  EXPECT_EQ(count.bytes, 0);
}

}  // namespace
}  // namespace fa2::test
