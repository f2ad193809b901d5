// SPDX-License-Identifier: Apache-2.0

// Small calls whose rows, heads and batch elements lie more than 2^31 elements
// apart, in every tensor, to either side: an offset held in 32 bits would go
// astray. Results must be those of the same call on dense tensors.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "fa2/training_ops.h"
#include "tests/limits/big_tensor.h"
#include "tests/support/attention_check.h"
#include "tests/support/attention_run.h"
#include "tests/support/case_generator.h"

namespace fa2::test {
namespace {

// More than 2^31, no multiple of a page, and 2^33 of f64 in all at most.
constexpr int64_t kFar = (int64_t{1} << 31) + 12345;

enum class Where { kBatch, kHeads, kRows, kRowsBackwards, kColumns };
constexpr Where kEverywhere[] = {Where::kBatch, Where::kHeads, Where::kRows,
                                 Where::kRowsBackwards, Where::kColumns};

Sizes FarStrides(const Sizes& sizes, Where where) {
  Sizes s = DenseStrides(sizes);
  switch (where) {
    case Where::kBatch:
      s[0] = kFar;
      break;
    case Where::kHeads:
      s[1] = kFar;
      break;
    case Where::kRows:
      s[2] = kFar;
      break;
    case Where::kRowsBackwards:
      s[2] = -kFar;
      break;
    case Where::kColumns:
      s[3] = kFar;
  }
  return s;
}

// Copies of tensors far apart; keeps their memory.
class FarTensors {
 public:
  explicit FarTensors(Where where) : where_(where) {}

  Tensor Copied(const Tensor& from) {
    if (!from.given()) return Tensor();
    tensors_.push_back(MakeFar(from.view.dtype, from.view.sizes,
                               FarStrides(from.view.sizes, where_)));
    const Tensor to = tensors_.back().tensor;
    // Bits, whatever they mean.
    const auto bytes = static_cast<int64_t>(SizeOf(from.view.dtype));
    ForEachIndex(from.view.sizes, [&](const Sizes& at) {
      int64_t a = 0, b = 0;
      for (size_t i = 0; i < 4; ++i) {
        a += at[i] * from.view.strides[i];
        b += at[i] * to.view.strides[i];
      }
      std::memcpy(static_cast<char*>(to.view.data) + b * bytes,
                  static_cast<const char*>(from.view.data) + a * bytes,
                  static_cast<size_t>(bytes));
    });
    return to;
  }

 private:
  const Where where_;
  std::vector<BigTensor> tensors_;
};

void ExpectSame(const Tensor& far, const Tensor& dense, const char* name) {
  if (!dense.given()) return;
  EXPECT_TRUE(SameBits(far.view, dense.view)) << name;
}

void ExpectFarAttention(const AttentionCase& c, Where where, Context* context) {
  SCOPED_TRACE(Describe(c) + ", far " + std::to_string(int(where)));
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs dense = MakeOutputs(c, inputs);
  FarTensors far(where);
  AttentionInputs in = inputs;
  for (Tensor* t : {&in.q, &in.k, &in.v, &in.dout, &in.bias, &in.alibi_slopes,
                    &in.sinks, &in.dlse, &in.out, &in.lse, &in.delta,
                    &in.cu_seqlens_q, &in.cu_seqlens_k}) {
    *t = far.Copied(*t);
  }
  in.options.bias = in.bias.view;
  in.options.alibi_slopes = in.alibi_slopes.view;
  in.options.sinks = in.sinks.view;
  in.options.cu_seqlens_q = in.cu_seqlens_q.view;
  in.options.cu_seqlens_k = in.cu_seqlens_k.view;
  AttentionOutputs out = dense;
  for (Tensor* t : {&out.out, &out.lse, &out.dq, &out.dk, &out.dv, &out.dbias,
                    &out.dalibi, &out.dsinks}) {
    *t = far.Copied(*t);
  }
  ExpectAttention(c, inputs, {context});  // the dense call is right
  Status status = AttentionForward(ForwardArgs(inputs, dense), context);
  ASSERT_TRUE(status.ok()) << status.message();
  status = AttentionBackward(BackwardArgs(c, inputs, dense), context);
  ASSERT_TRUE(status.ok()) << status.message();
  status = AttentionForward(ForwardArgs(in, out), context);
  ASSERT_TRUE(status.ok()) << status.message();
  status = AttentionBackward(BackwardArgs(c, in, out), context);
  ASSERT_TRUE(status.ok()) << status.message();
  ExpectSame(out.out, dense.out, "out");
  if (!c.padded_lse) ExpectSame(out.lse, dense.lse, "lse");
  ExpectSame(out.dq, dense.dq, "dq");
  ExpectSame(out.dk, dense.dk, "dk");
  ExpectSame(out.dv, dense.dv, "dv");
  ExpectSame(out.dbias, dense.dbias, "dbias");
  ExpectSame(out.dalibi, dense.dalibi, "dalibi_slopes");
  ExpectSame(out.dsinks, dense.dsinks, "dsinks");
}

TEST(FarOffsets, Attention) {
  const Contexts contexts({2});
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const Where where : kEverywhere) {
      AttentionCase c;
      c.dtype = dtype;
      c.batch = 2;
      c.heads = 4;
      c.kv_heads = 2;
      c.nq = 37;
      c.nk = 43;
      c.head_dim = 16;
      c.value_dim = 24;
      c.causal = Causal::kBottomRight;
      c.bias = DType::kF32;
      c.want_dbias = true;
      c.sinks = c.want_dsinks = true;
      c.alibi = c.want_dalibi = true;
      c.alibi_per_batch = true;
      c.dlse = true;
      ExpectFarAttention(c, where, contexts.list()[0]);
      if (HasFailure()) return;
    }
  }
}

TEST(FarOffsets, AnyOptions) {
  const Contexts contexts({2});
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    AttentionCase c = RandomCase(seed, CaseOptions());
    c.packing = Packing::kNone;
    ExpectFarAttention(c, kEverywhere[seed % 5], contexts.list()[0]);
    if (HasFailure()) return;
  }
}

// What the training kernels write for tensors placed by `place`.
std::vector<Tensor> TrainingKernels(
    DType dtype, Context* context,
    const std::function<Tensor(const Tensor&)>& place) {
  constexpr int64_t kRows = 37, kDim = 50;
  const Sizes sizes = {2, 3, kRows, kDim};
  std::vector<Tensor> written;
  Random random(7);
  const auto input = [&](const Sizes& s, DType type) {
    const Tensor t = MakeTensor(type, s);
    FillNormal(t.view, random);
    return place(t);
  };
  const auto output = [&](const Sizes& s, DType type) {
    const Tensor t = MakeTensor(type, s);
    Fill(t.view, 0.0);
    written.push_back(place(t));
    return written.back().view;
  };
  const auto integers = [&](int64_t n, int64_t below) {
    const Tensor t = MakeTensor(DType::kI64, {1, 1, 1, n});
    for (int64_t i = 0; i < n; ++i) {
      static_cast<int64_t*>(t.view.data)[i] = i * i % below;
    }
    return place(t);
  };
  const auto expect = [](const Status& status) {
    EXPECT_TRUE(status.ok()) << status.message();
  };
  const Tensor x = input(sizes, dtype), dy = input(sizes, dtype);
  const Tensor weight = input({1, 1, 1, kDim}, dtype);
  expect(Transpose2d(x.view, output({2, 3, kDim, kRows}, dtype), context));
  expect(Softmax(x.view, output(sizes, dtype), context));
  expect(SoftmaxBackward(dy.view, x.view, output(sizes, dtype), context));
  expect(RmsNorm(x.view, weight.view, 1e-5, output(sizes, dtype), context));
  RmsNormBackwardArgs norm;
  norm.dy = dy.view;
  norm.x = x.view;
  norm.weight = weight.view;
  norm.dx = output(sizes, dtype);
  norm.dweight = output({1, 1, 1, kDim}, dtype);
  expect(RmsNormBackward(norm, context));
  RotaryEmbeddingArgs rotary;
  rotary.x = x.view;
  const Tensor cos = input({2, 1, kRows, 20}, dtype);
  const Tensor sin = input({2, 1, kRows, 20}, dtype);
  rotary.cos = cos.view;
  rotary.sin = sin.view;
  rotary.y = output(sizes, dtype);
  expect(RotaryEmbedding(rotary, context));
  expect(SwiGlu(x.view, dy.view, output(sizes, dtype), context));
  SwiGluBackwardArgs swiglu;
  swiglu.dy = dy.view;
  swiglu.gate = swiglu.up = x.view;
  swiglu.dgate = output(sizes, dtype);
  swiglu.dup = output(sizes, dtype);
  expect(SwiGluBackward(swiglu, context));
  EmbeddingBackwardArgs embedding;
  const Tensor ids = integers(6 * kRows, 11);
  embedding.dy = dy.view;
  embedding.ids = ids.view;
  embedding.dweight = output({1, 1, 11, kDim}, dtype);
  expect(EmbeddingBackward(embedding, context));
  CrossEntropyArgs loss;
  const Tensor targets = integers(6 * kRows, kDim);
  const Tensor weights = input({1, 1, 1, 6 * kRows}, DType::kF32);
  loss.logits = x.view;
  loss.targets = targets.view;
  loss.weights = weights.view;
  loss.loss = output({1, 1, 1, 1}, DType::kF64);
  loss.losses = output({1, 1, 1, 6 * kRows}, DType::kF64);
  loss.dlogits = output(sizes, dtype);
  expect(CrossEntropy(loss, context));
  return written;
}

TEST(FarOffsets, TrainingKernels) {
  const Contexts contexts({2});
  Context* const context = contexts.list()[0];
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    const std::vector<Tensor> dense =
        TrainingKernels(dtype, context, [](const Tensor& t) { return t; });
    for (const Where where : kEverywhere) {
      if (where == Where::kColumns) continue;  // their rows are contiguous
      FarTensors far(where);
      const std::vector<Tensor> there = TrainingKernels(
          dtype, context, [&](const Tensor& t) { return far.Copied(t); });
      for (size_t n = 0; n < dense.size(); ++n) {
        EXPECT_TRUE(SameBits(there[n].view, dense[n].view))
            << NameOf(dtype) << ", far " << int(where) << ", output " << n;
      }
    }
  }
}

}  // namespace
}  // namespace fa2::test
