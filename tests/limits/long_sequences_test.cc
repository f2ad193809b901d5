// SPDX-License-Identifier: Apache-2.0

// A million keys, a hundred thousand sequences, rows of 65,536: sampled rows
// against float64, and the workspace in proportion to the inputs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "tests/limits/big_tensor.h"
#include "tests/limits/part.h"
#include "tests/support/attention_check.h"
#include "tests/support/attention_run.h"
#include "tests/support/tensor.h"

namespace fa2::test {
namespace {

// FA2_LIMITS_KEYS=65536 is for a first look.
int64_t Million() {
  const char* const keys = std::getenv("FA2_LIMITS_KEYS");
  return keys == nullptr ? 1048576 : std::stoll(keys);
}

// As attention_workspace_test has it, and as much for the threads again.
void ExpectMemory(const Context& context, const AttentionCase& c) {
  const int64_t columns = c.head_dim + c.value_dim;
  const auto read =
      static_cast<size_t>(c.batch * (c.heads * c.nq + c.kv_heads * c.nk) *
                          columns * static_cast<int64_t>(SizeOf(c.dtype)));
  const auto threads = static_cast<size_t>(context.Info().num_threads);
  EXPECT_LE(context.PeakWorkspaceBytes(),
            10 * read + threads * (size_t{16} << 20));
  std::cout << Describe(c) << ": " << (context.PeakWorkspaceBytes() >> 20)
            << " MiB of workspace, tensors read " << (read >> 20) << " MiB\n";
}

std::unique_ptr<Context> MakeContext() {
  std::unique_ptr<Context> context;
  EXPECT_TRUE(Context::Create(ContextOptions(), &context).ok());
  return context;
}

// The tensors of a dense call, which live as long as it does.
struct BigCall {
  WholeCall whole;
  std::vector<BigTensor> tensors;
};

BigCall MakeBigCall(const AttentionCase& c) {
  BigCall big;
  AttentionInputs& in = big.whole.inputs;
  AttentionOutputs& o = big.whole.outputs;
  big.whole.c = c;
  const auto make = [&](Tensor* to, DType dtype, int64_t heads, int64_t rows,
                        int64_t columns, double sigma) {
    big.tensors.push_back(MakeBig(dtype, {c.batch, heads, rows, columns}));
    *to = big.tensors.back().tensor;
    if (sigma > 0.0) FillFast(big.tensors.back(), big.tensors.size(), sigma);
  };
  make(&in.q, c.dtype, c.heads, c.nq, c.head_dim, c.q_sigma);
  make(&in.k, c.dtype, c.kv_heads, c.nk, c.head_dim, 1.0);
  make(&in.v, c.dtype, c.kv_heads, c.nk, c.value_dim, 1.0);
  make(&in.dout, c.dtype, c.heads, c.nq, c.value_dim, 1.0);
  make(&o.out, c.dtype, c.heads, c.nq, c.value_dim, 0.0);
  make(&o.lse, c.statistics_dtype(), c.heads, c.nq, 1, 0.0);
  make(&o.dq, c.dtype, c.heads, c.nq, c.head_dim, 0.0);
  make(&o.dk, c.dtype, c.kv_heads, c.nk, c.head_dim, 0.0);
  make(&o.dv, c.dtype, c.kv_heads, c.nk, c.value_dim, 0.0);
  in.out = o.out;
  in.lse = o.lse;
  in.options.causal = c.causal;
  in.options.window_left = c.window_left;
  in.options.precision = c.precision;
  in.options.dropout_p = c.dropout_p;
  in.options.philox_seed = c.philox_seed;
  return big;
}

void RunCall(const WholeCall& whole, Context* context) {
  const Status forward =
      AttentionForward(ForwardArgs(whole.inputs, whole.outputs), context);
  ASSERT_TRUE(forward.ok()) << forward.message();
  const Status backward = AttentionBackward(
      BackwardArgs(whole.c, whole.inputs, whole.outputs), context);
  ASSERT_TRUE(backward.ok()) << backward.message();
}

void ExpectRows(const WholeCall& whole, int64_t b, int64_t g,
                const std::vector<int64_t>& queries,
                const std::vector<int64_t>& keys, int64_t rows) {
  for (const int64_t first : queries) {
    for (const auto& wrong : CheckQueries(whole, b, g, first, rows)) {
      ADD_FAILURE() << "queries from " << first << ": " << wrong;
    }
  }
  for (const int64_t first : keys) {
    for (const auto& wrong : CheckKeys(whole, b, g, first, rows)) {
      ADD_FAILURE() << "keys from " << first << ": " << wrong;
    }
  }
}

// Dropout numbers the elements of the scores up to 2^40.
TEST(Limits, AMillionQueriesAndKeysInAWindow) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    AttentionCase c;
    c.dtype = dtype;
    c.nq = c.nk = Million();
    c.head_dim = c.value_dim = dtype == DType::kBF16 ? 64 : 32;
    c.causal = Causal::kBottomRight;
    c.window_left = 4096;
    c.dropout_p = 0.1;
    c.philox_seed = 5;
    const auto context = MakeContext();
    const BigCall big = MakeBigCall(c);
    RunCall(big.whole, context.get());
    ExpectMemory(*context, c);
    const std::vector<int64_t> first = {0, 4090, c.nk / 2 - 1, c.nk - 8};
    ExpectRows(big.whole, 0, 0, first, first, 8);
  }
}

// 64 blocks of 64 queries, or fewer larger ones.
TEST(Limits, AMillionKeysCausal) {
  AttentionCase c;
  c.dtype = DType::kBF16;
  c.nq = 4096;
  c.nk = Million();
  c.head_dim = c.value_dim = 64;
  c.causal = Causal::kBottomRight;
  const auto context = MakeContext();
  const BigCall big = MakeBigCall(c);
  RunCall(big.whole, context.get());
  ExpectMemory(*context, c);
  ExpectRows(big.whole, 0, 0, {0, 4094},
             {0, c.nk / 4 * 3 - 7, c.nk - 4096, c.nk - 2}, 2);
}

TEST(Limits, OneQueryAMillionKeys) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    AttentionCase c;
    c.dtype = dtype;
    c.heads = 4;
    c.kv_heads = 2;
    c.nq = 1;
    c.nk = 1000000;
    c.head_dim = c.value_dim = 64;
    const auto context = MakeContext();
    const BigCall big = MakeBigCall(c);
    RunCall(big.whole, context.get());
    ExpectMemory(*context, c);
    ExpectRows(big.whole, 0, 1, {0}, {0, 524288, 999999}, 1);
  }
}

TEST(Limits, AHundredThousandHeads) {
  AttentionCase c;
  c.dtype = DType::kBF16;
  c.batch = 1000;
  c.heads = c.kv_heads = 100;
  c.nq = c.nk = 16;
  c.head_dim = c.value_dim = 64;
  c.causal = Causal::kBottomRight;
  const auto context = MakeContext();
  const BigCall big = MakeBigCall(c);
  RunCall(big.whole, context.get());
  ExpectMemory(*context, c);
  for (const int64_t b : {0, 499, 999}) {
    for (const int64_t g : {0, 37, 99}) {
      ExpectRows(big.whole, b, g, {0}, {0}, 16);
    }
  }
}

TEST(Limits, AHundredThousandSequences) {
  constexpr int64_t kSequences = 100000, kLength = 16;
  AttentionCase c;
  c.dtype = DType::kBF16;
  c.nq = c.nk = kSequences * kLength;
  c.head_dim = c.value_dim = 64;
  const auto context = MakeContext();
  BigCall big = MakeBigCall(c);
  AttentionInputs packed = big.whole.inputs;
  const Tensor prefix = MakeTensor(DType::kI32, {1, 1, 1, kSequences + 1});
  for (int64_t n = 0; n <= kSequences; ++n) {
    Set(prefix.view, {0, 0, 0, n}, static_cast<double>(n * kLength));
  }
  packed.options.cu_seqlens_q = prefix.view;
  packed.options.cu_seqlens_k = prefix.view;
  RunCall({c, packed, big.whole.outputs}, context.get());
  ExpectMemory(*context, c);
  // The same memory as a batch of sequences.
  const auto as_batch = [](Tensor* t) {
    if (!t->given()) return;
    const int64_t columns = t->view.sizes[3];
    t->view.sizes = {kSequences, 1, kLength, columns};
    t->view.strides = DenseStrides(t->view.sizes);
  };
  AttentionInputs& in = big.whole.inputs;
  AttentionOutputs& o = big.whole.outputs;
  for (Tensor* t : {&in.q, &in.k, &in.v, &in.dout, &in.out, &in.lse, &o.out,
                    &o.lse, &o.dq, &o.dk, &o.dv}) {
    as_batch(t);
  }
  big.whole.c.batch = kSequences;
  big.whole.c.nq = big.whole.c.nk = kLength;
  for (const int64_t b :
       {int64_t{0}, int64_t{1}, int64_t{33333}, kSequences - 1}) {
    ExpectRows(big.whole, b, 0, {0}, {0}, kLength);
  }
}

TEST(Limits, RowsOf65536) {
  const Contexts contexts({1, 3});
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
    AttentionCase c;
    c.dtype = dtype;
    c.heads = 2;
    c.kv_heads = 1;
    c.nq = 7;
    c.nk = 9;
    c.head_dim = c.value_dim = 65536;
    c.causal = Causal::kBottomRight;
    ExpectAttention(c, contexts.list());
  }
}

// Every product of two elements is the square of the type's largest number, or
// nearly the largest f32: scores are finite, one key has all of a row, and no
// gradient is NaN or infinite that is not so in float64.
TEST(Limits, ScoresAtTheEndOfTheirType) {
  const Contexts contexts({1, 3});
  struct Extreme {
    DType dtype;
    double size;
  };
  // 65504^2 * 64 / 8 is 3.4e10; (2^60)^2 * 64 / 8 is 1.1e37, and 2^62 is past
  // f32's 3.4e38 before the factor 1/8.
  for (const Extreme e :
       {Extreme{DType::kF16, 65504.0}, Extreme{DType::kF32, 0x1p60},
        Extreme{DType::kBF16, 0x1p60}, Extreme{DType::kF64, 0x1p508}}) {
    AttentionCase c;
    c.dtype = e.dtype;
    c.nq = 5;
    c.nk = 67;
    c.head_dim = 64;
    c.value_dim = 16;
    const AttentionInputs inputs = MakeInputs(c, [&](AttentionInputs* in) {
      Fill(in->q.view, e.size);
      // The last key has every row, the others a quarter of its score or less.
      ForEachIndex(in->k.view.sizes, [&](const Sizes& at) {
        Set(in->k.view, at,
            at[2] == 66
                ? e.size
                : e.size * (static_cast<double>(at[2] % 8) / 32.0 - 0.2));
      });
    });
    for (Context* const context : contexts.list()) {
      const AttentionOutputs o = MakeOutputs(c, inputs);
      Status status = AttentionForward(ForwardArgs(inputs, o), context);
      ASSERT_TRUE(status.ok()) << status.message();
      AttentionInputs given = inputs;
      given.out = o.out;
      given.lse = o.lse;
      status = AttentionBackward(BackwardArgs(c, given, o), context);
      ASSERT_TRUE(status.ok()) << status.message();
      for (int64_t i = 0; i < c.nq; ++i) {
        const double score = e.size * e.size * 8.0;
        EXPECT_NEAR(Get(o.lse.view, {0, 0, i, 0}), score, score * 0x1p-15)
            << NameOf(c.dtype);
        for (int64_t d = 0; d < c.value_dim; ++d) {
          EXPECT_EQ(Get(o.out.view, {0, 0, i, d}),
                    Get(inputs.v.view, {0, 0, 66, d}))
              << NameOf(c.dtype);
        }
      }
      // dV of the other keys is 0; that of the last one is the sum of dO.
      ForEachIndex(o.dv.view.sizes, [&](const Sizes& at) {
        double sum = 0.0, size = 0.0;
        if (at[2] == 66) {
          for (int64_t i = 0; i < c.nq; ++i) {
            const double x = Get(inputs.dout.view, {0, 0, i, at[3]});
            sum += x;
            size += std::abs(x);
          }
        }
        EXPECT_NEAR(Get(o.dv.view, at), sum, size * 0x1p-7);
      });
    }
  }
}

}  // namespace
}  // namespace fa2::test
