// SPDX-License-Identifier: Apache-2.0

// What a call promises beside its numbers: sizes of 0, far offsets, large
// outputs, calls at once, after fork(), any part of dropout's stream.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "fa2/attention.h"
#include "src/common/philox.h"
#include "tests/support/attention_case.h"
#include "tests/support/attention_check.h"
#include "tests/support/attention_run.h"
#include "tests/support/fork_trouble.h"

namespace fa2::test {
namespace {

AttentionCase BaseCase(DType dtype) {
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

std::vector<DType> AllTypes() {
  return {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
}

TEST(AttentionEdge, SizesOfZero) {
  const Contexts contexts({1, 2});
  for (const DType dtype : AllTypes()) {
    for (int which = 0; which < 7; ++which) {
      AttentionCase c = BaseCase(dtype);
      if (which == 0) c.batch = 0;
      if (which == 1) c.heads = 0;
      if (which == 2) c.heads = c.kv_heads = 0;
      if (which == 3) c.nq = 0;
      if (which == 4) c.nk = 0;
      if (which == 5) c.head_dim = 0;
      if (which == 6) c.value_dim = 0;
      ExpectAttention(c, contexts.list());
      // Nothing is added where there is nothing.
      c.accumulate_dq = c.accumulate_dk = c.accumulate_dv = true;
      ExpectAttention(c, contexts.list());
    }
  }
}

TEST(AttentionEdge, NoGradientWanted) {
  const Contexts contexts({1, 2});
  AttentionCase c = BaseCase(DType::kBF16);
  c.want_dq = c.want_dk = c.want_dv = false;
  ExpectAttention(c, contexts.list());
}

TEST(AttentionEdge, EachGradientAlone) {
  const Contexts contexts({1, 3});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (int which = 0; which < 3; ++which) {
      AttentionCase c = BaseCase(dtype);
      c.want_dq = which == 0;
      c.want_dk = which == 1;
      c.want_dv = which == 2;
      ExpectAttention(c, contexts.list());
    }
  }
}

TEST(AttentionEdge, WideHeads) {
  const Contexts contexts({2});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    AttentionCase c = BaseCase(dtype);
    c.heads = c.kv_heads = 1;
    c.nq = 5;
    c.nk = 19;
    c.head_dim = 4099;
    c.value_dim = 1500;
    ExpectAttention(c, contexts.list());
    if (CasesOfSixteen() < 16) continue;
    c.head_dim = c.value_dim = 65536;
    ExpectAttention(c, contexts.list());
  }
}

// Rows so far apart that offsets pass 2^31 elements, in a mapping of which only
// the touched pages exist.
class SparseMapping {
 public:
  explicit SparseMapping(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~SparseMapping() {
    if (given()) munmap(data_, bytes_);
  }
  SparseMapping(const SparseMapping&) = delete;
  SparseMapping& operator=(const SparseMapping&) = delete;
  bool given() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  size_t bytes_;
  void* data_;
};

// K and V of one row, whose stride is 0: packed, and where other keys would be
// taken as they lie.
TEST(AttentionEdge, KeysOfOneRow) {
  const Contexts contexts({1, 3});
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    for (const int64_t nq : {3, 40, 130}) {
      AttentionCase c;
      c.dtype = dtype;
      c.heads = 3;
      c.kv_heads = 3;
      c.nq = nq;
      c.nk = 50;
      c.head_dim = 24;
      c.value_dim = 40;
      c.keys_broadcast = true;
      ExpectAttention(c, MakeInputs(c), contexts.list());
    }
  }
}

TEST(AttentionEdge, OffsetsPastTwoToThe31) {
  constexpr int64_t kRowStride = int64_t{1} << 30;
  constexpr int64_t kRows = 5;
  constexpr size_t kBytes = static_cast<size_t>(kRowStride * kRows) * 2;
  AttentionCase c = BaseCase(DType::kBF16);
  c.heads = c.kv_heads = 1;
  c.nq = c.nk = kRows;
  c.head_dim = c.value_dim = 32;
  const AttentionInputs near = MakeInputs(c);
  const AttentionOutputs near_results = MakeOutputs(c, near);
  const SparseMapping mapping(8 * kBytes);
  if (!mapping.given()) {
    GTEST_SKIP() << "no address space of " << 8 * kBytes << " bytes";
  }
  int64_t used = 0;
  const auto spread = [&](const Tensor& t) {
    Tensor far = t;
    far.view.strides = {0, 0, kRowStride, 1};
    far.view.data = static_cast<uint8_t*>(mapping.data()) +
                    static_cast<size_t>(used++) * kBytes;
    Copy(t.view, far.view);
    return far;
  };
  AttentionInputs far = near;
  far.q = spread(near.q);
  far.k = spread(near.k);
  far.v = spread(near.v);
  far.dout = spread(near.dout);
  AttentionOutputs far_results = near_results;
  far_results.out = spread(near_results.out);
  far_results.dq = spread(near_results.dq);
  far_results.dk = spread(near_results.dk);
  far_results.dv = spread(near_results.dv);
  for (const auto& [inputs, outputs] :
       {std::pair(near, near_results), std::pair(far, far_results)}) {
    Status status = AttentionForward(ForwardArgs(inputs, outputs));
    ASSERT_TRUE(status.ok()) << status.message();
    status = AttentionBackward(BackwardArgs(c, inputs, outputs));
    ASSERT_TRUE(status.ok()) << status.message();
  }
  EXPECT_TRUE(SameBits(near_results.out.view, far_results.out.view));
  EXPECT_TRUE(SameBits(near_results.dq.view, far_results.dq.view));
  EXPECT_TRUE(SameBits(near_results.dk.view, far_results.dk.view));
  EXPECT_TRUE(SameBits(near_results.dv.view, far_results.dv.view));
}

// One run's outputs, for comparing bits.
AttentionOutputs RunOnce(const AttentionCase& c, const AttentionInputs& inputs,
                         Context* context) {
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  EXPECT_TRUE(AttentionForward(ForwardArgs(inputs, outputs), context).ok());
  EXPECT_TRUE(
      AttentionBackward(BackwardArgs(c, inputs, outputs), context).ok());
  return outputs;
}

bool SameOutputs(const AttentionOutputs& a, const AttentionOutputs& b) {
  return SameBits(a.out.view, b.out.view) && SameBits(a.lse.view, b.lse.view) &&
         SameBits(a.dq.view, b.dq.view) && SameBits(a.dk.view, b.dk.view) &&
         SameBits(a.dv.view, b.dv.view);
}

// The gradients of a thread that works alone, 4.5 MiB, are written past its
// caches, those of two threads are not.
TEST(AttentionEdge, OutputsLargerThanCaches) {
  const Contexts contexts({1, 2});
  AttentionCase c = BaseCase(DType::kBF16);
  c.heads = c.kv_heads = 192;
  c.nq = c.nk = 32;
  c.head_dim = c.value_dim = 128;
  const AttentionInputs inputs = MakeInputs(c);
  EXPECT_TRUE(SameOutputs(RunOnce(c, inputs, contexts.list()[0]),
                          RunOnce(c, inputs, contexts.list()[1])));
}

TEST(AttentionEdge, CallsFromSeveralThreadsAtOnce) {
  const Contexts contexts({2, 1});
  const AttentionCase small = BaseCase(DType::kBF16);
  AttentionCase large = BaseCase(DType::kF32);
  large.nq = large.nk = 300;
  const std::vector<AttentionCase> cases = {small, large};
  std::vector<AttentionInputs> inputs;
  std::vector<AttentionOutputs> alone;
  for (const AttentionCase& c : cases) {
    inputs.push_back(MakeInputs(c));
    alone.push_back(RunOnce(c, inputs.back(), contexts.list()[0]));
  }
  // Four callers: two on one context, one on another, one on the default.
  Context* const used[] = {contexts.list()[0], contexts.list()[0],
                           contexts.list()[1], nullptr};
  int wrong[4] = {};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t round = 0; round < 6; ++round) {
        const size_t which = (t + round) % 2;
        wrong[t] += !SameOutputs(RunOnce(cases[which], inputs[which], used[t]),
                                 alone[which]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : wrong) EXPECT_EQ(count, 0);
}

TEST(AttentionEdge, WorksInTheChildOfAFork) {
  if (const char* trouble = ForkTroubleBesideThreads()) {
    GTEST_SKIP() << trouble;
  }
  const Contexts contexts({2});
  const AttentionCase c = BaseCase(DType::kBF16);
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs before = RunOnce(c, inputs, contexts.list()[0]);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    const AttentionOutputs after = RunOnce(c, inputs, contexts.list()[0]);
    _exit(SameOutputs(before, after) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(AttentionEdge, DeltaIsTheRowSumOfOutTimesDout) {
  for (const DType dtype : AllTypes()) {
    for (const Layout layout : {Layout::kBhsd, Layout::kBshd, Layout::kReversed,
                                Layout::kStridedLast}) {
      for (const int64_t depth : {0, 1, 7, 64, 129}) {
        Random random(static_cast<uint64_t>(depth));
        const Sizes sizes = {2, 3, 37, depth};
        const Tensor out = MakeTensor(dtype, sizes, layout);
        const Tensor dout = MakeTensor(dtype, sizes, layout);
        FillNormal(out.view, random);
        FillNormal(dout.view, random);
        const DType sum_type = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
        const Tensor delta = MakeTensor(sum_type, {2, 3, 37, 1}, layout);
        delta.buffer->Snapshot();
        const Status status = AttentionDelta(out.view, dout.view, delta.view);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_FALSE(delta.buffer->ChangedOutside({delta.view}));
        const double roundoff = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
        ForEachIndex(delta.view.sizes, [&](const Sizes& at) {
          double sum = 0.0;
          double size = 0.0;
          for (int64_t d = 0; d < depth; ++d) {
            const Sizes from = {at[0], at[1], at[2], d};
            const double term = Get(out.view, from) * Get(dout.view, from);
            sum += term;
            size += std::abs(term);
          }
          EXPECT_NEAR(Get(delta.view, at), sum, 16 * roundoff * size);
        });
      }
    }
  }
}

TEST(AttentionEdge, OutIsNotLookedAtWhereDeltaIsGiven) {
  const Contexts contexts({1, 2});
  for (const int64_t nq : {3, 130}) {
    AttentionCase c = BaseCase(DType::kBF16);
    c.batch = 3;
    c.nq = nq;
    c.delta = true;
    const AttentionInputs inputs = MakeInputs(c);
    const ExpectedOutputs expected = ComputeExpected(c, inputs);
    for (Context* const context : contexts.list()) {
      const AttentionOutputs outputs = MakeOutputs(c, inputs);
      AttentionBackwardArgs args = BackwardArgs(c, inputs, outputs);
      constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
      args.out = args.dout;
      args.out.sizes = {kLeast, 5, kLeast, kLeast};
      args.out.strides = {kLeast, 3, kLeast, 2};
      size_t bytes = 0;
      ASSERT_TRUE(AttentionBackwardWorkspace(args, &bytes, context).ok());
      const Status status = AttentionBackward(args, context);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(CompareBackward(c, outputs, expected, {}).empty());
    }
  }
}

TEST(AttentionEdge, KeepMaskIsThePhiloxMapping) {
  for (const double p : {0.0, 0.1, 0.5, 1.0}) {
    for (const uint64_t offset :
         {uint64_t{0}, uint64_t{1}, uint64_t{6}, uint64_t{1} << 40}) {
      const Sizes sizes = {2, 3, 7, 53};
      const Tensor keep = MakeTensor(DType::kBool, sizes);
      const uint64_t seed = 0xFEDCBA9876543210u;
      const Status status = PhiloxKeepMask(p, seed, offset, keep.view);
      ASSERT_TRUE(status.ok()) << status.message();
      uint64_t n = offset;
      int wrong = 0;
      ForEachIndex(sizes, [&](const Sizes& at) {
        wrong += (Get(keep.view, at) != 0.0) != PhiloxKeep(p, seed, n++);
      });
      EXPECT_EQ(wrong, 0) << "p " << p << " offset " << offset;
    }
  }
  // The stride of a dimension of one element is nobody's.
  Tensor keep = MakeTensor(DType::kBool, {1, 1, 7, 53});
  keep.view.strides[0] = keep.view.strides[1] = 5;
  EXPECT_TRUE(PhiloxKeepMask(0.5, 1, 0, keep.view).ok());
}

// Philox blocks have numbers of two words: the upper one changes amid a block
// of scores, and the number of the output begins again at 2^64.
TEST(AttentionEdge, DropoutOfAnyPartOfTheStream) {
  const Contexts contexts({1, 2});
  const uint64_t upper_changes = uint64_t{1} << 34;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    AttentionCase c = BaseCase(dtype);
    c.nk = 96;
    c.dropout_p = 0.3;
    c.philox_seed = 0x123456789abcdef0u;
    for (const uint64_t first :
         {upper_changes, 5 * upper_changes, uint64_t{0}}) {
      // Amid the second of four heads; rows that begin with a whole block, and
      // others.
      for (const uint64_t before : {17000, 17001}) {
        c.philox_offset = first - before;
        ExpectAttention(c, contexts.list());
      }
    }
    c.dropout_p = 1.0;
    ExpectAttention(c, contexts.list());
  }
}

// Kernels may flush subnormals while they run; the caller's arithmetic is its
// own.
TEST(AttentionEdge, SubnormalsAreTheCallersAgain) {
  const Contexts contexts({1, 2});
  for (const DType dtype : AllTypes()) {
    ExpectAttention(BaseCase(dtype), contexts.list());
    volatile float x = std::numeric_limits<float>::min();
    x = x * 0.5f;
    EXPECT_GT(x, 0.0f);
    x = x * 2.0f;
    EXPECT_EQ(x, std::numeric_limits<float>::min());
  }
}

}  // namespace
}  // namespace fa2::test
