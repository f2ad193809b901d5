// SPDX-License-Identifier: Apache-2.0

// The float64 oracle against finite differences of its own forward, for each
// option, and at the corners of the contract.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fa2/reference.h"
#include "tests/support/attention_case.h"
#include "tests/support/error.h"

namespace fa2::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A small case of f64 with gradients of out and lse, and every gradient wanted.
AttentionCase SmallCase() {
  AttentionCase c;
  c.dtype = DType::kF64;
  c.batch = 2;
  c.heads = 2;
  c.kv_heads = 2;
  c.nq = 5;
  c.nk = 7;
  c.head_dim = 4;
  c.value_dim = 3;
  c.dlse = true;
  return c;
}

// The same values in f64, so that they can be moved by little.
void Widen(Tensor* tensor, ConstTensorView* option) {
  if (!tensor->given()) return;
  const Tensor wide = MakeTensor(DType::kF64, tensor->view.sizes);
  Copy(tensor->view, wide.view);
  *tensor = wide;
  *option = wide.view;
}

AttentionInputs WideInputs(const AttentionCase& c) {
  AttentionInputs inputs = MakeInputs(c);
  if (inputs.bias.given() && inputs.bias.view.dtype != DType::kBool) {
    Widen(&inputs.bias, &inputs.options.bias);
  }
  Widen(&inputs.alibi_slopes, &inputs.options.alibi_slopes);
  Widen(&inputs.sinks, &inputs.options.sinks);
  return inputs;
}

// sum(out * dout) + sum(lse * dlse), whose gradients backward gives.
double Loss(const AttentionInputs& inputs) {
  AttentionOutputs outputs;
  outputs.out = MakeTensor(DType::kF64, inputs.dout.view.sizes);
  outputs.lse = MakeTensor(DType::kF64, inputs.lse.view.sizes);
  const Status status = AttentionReferenceForward(ForwardArgs(inputs, outputs));
  EXPECT_TRUE(status.ok()) << status.message();
  double loss = 0.0;
  ForEachIndex(inputs.dout.view.sizes, [&](const Sizes& at) {
    loss += Get(outputs.out.view, at) * Get(inputs.dout.view, at);
  });
  if (inputs.dlse.given()) {
    ForEachIndex(inputs.dlse.view.sizes, [&](const Sizes& at) {
      const double lse = Get(outputs.lse.view, at);
      if (std::isfinite(lse)) loss += lse * Get(inputs.dlse.view, at);
    });
  }
  return loss;
}

void ExpectGradient(const std::string& name, const AttentionInputs& inputs,
                    const Tensor& input, const Tensor& gradient) {
  if (!input.given()) return;
  // Balances the h^2 of central differences with rounding, 1e-16 / h.
  constexpr double kStep = 1e-5;
  ForEachIndex(input.view.sizes, [&](const Sizes& at) {
    const double held = Get(input.view, at);
    if (!std::isfinite(held)) {
      EXPECT_EQ(Get(gradient.view, at), 0.0) << name << " " << Text(at);
      return;
    }
    Set(input.view, at, held + kStep);
    const double above = Loss(inputs);
    Set(input.view, at, held - kStep);
    const double below = Loss(inputs);
    Set(input.view, at, held);
    const double slope = (above - below) / (2 * kStep);
    EXPECT_NEAR(Get(gradient.view, at), slope, 1e-8 * (1 + std::abs(slope)))
        << name << " " << Text(at);
  });
}

// With more rows of queries than the dense case's, packed.
void CheckGradients(const AttentionCase& c) {
  SCOPED_TRACE(Describe(c));
  const AttentionInputs inputs = WideInputs(c);
  const auto like = [](const Tensor& t) {
    return t.given() ? MakeTensor(DType::kF64, t.view.sizes) : Tensor();
  };
  AttentionOutputs gradients;
  gradients.dq = like(inputs.q);
  gradients.dk = like(inputs.k);
  gradients.dv = like(inputs.v);
  if (inputs.bias.given() && inputs.bias.view.dtype != DType::kBool) {
    gradients.dbias = like(inputs.bias);
  }
  gradients.dalibi = like(inputs.alibi_slopes);
  gradients.dsinks = like(inputs.sinks);
  const Status status =
      AttentionReferenceBackward(BackwardArgs(c, inputs, gradients));
  ASSERT_TRUE(status.ok()) << status.message();
  ExpectGradient("q", inputs, inputs.q, gradients.dq);
  ExpectGradient("k", inputs, inputs.k, gradients.dk);
  ExpectGradient("v", inputs, inputs.v, gradients.dv);
  if (gradients.dbias.given()) {
    ExpectGradient("bias", inputs, inputs.bias, gradients.dbias);
  }
  ExpectGradient("alibi_slopes", inputs, inputs.alibi_slopes, gradients.dalibi);
  ExpectGradient("sinks", inputs, inputs.sinks, gradients.dsinks);
}

TEST(ReferenceGradient, Plain) {
  AttentionCase c = SmallCase();
  CheckGradients(c);
  c.dlse = false;
  CheckGradients(c);
  c.scale = 0.3;
  CheckGradients(c);
}

TEST(ReferenceGradient, GroupedQueryHeads) {
  AttentionCase c = SmallCase();
  c.heads = 4;
  CheckGradients(c);
  c.kv_heads = 1;
  CheckGradients(c);
}

TEST(ReferenceGradient, Masks) {
  for (const Causal causal :
       {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
    for (const auto& [left, right] : std::vector<std::pair<int64_t, int64_t>>{
             {-1, -1}, {2, -1}, {-1, 1}, {1, 2}, {0, 0}}) {
      AttentionCase c = SmallCase();
      c.causal = causal;
      c.window_left = left;
      c.window_right = right;
      CheckGradients(c);
      std::swap(c.nq, c.nk);  // bottom-right rows that see no key
      CheckGradients(c);
    }
  }
}

TEST(ReferenceGradient, Softcap) {
  AttentionCase c = SmallCase();
  c.softcap = 1.5;
  CheckGradients(c);
}

TEST(ReferenceGradient, BiasOfEveryBroadcast) {
  for (int dims = 0; dims < 16; ++dims) {
    AttentionCase c = SmallCase();
    c.bias = DType::kF32;
    c.bias_masked = 0.2;
    for (size_t i = 0; i < 4; ++i) c.bias_broadcast[i] = (dims >> i & 1) != 0;
    CheckGradients(c);
  }
}

TEST(ReferenceGradient, BooleanMask) {
  AttentionCase c = SmallCase();
  c.bias = DType::kBool;
  c.bias_masked = 0.5;
  CheckGradients(c);
}

TEST(ReferenceGradient, Alibi) {
  AttentionCase c = SmallCase();
  c.alibi = true;
  CheckGradients(c);
  c.alibi_per_batch = true;
  CheckGradients(c);
}

TEST(ReferenceGradient, Sinks) {
  AttentionCase c = SmallCase();
  c.sinks = true;
  CheckGradients(c);
  c.causal = Causal::kBottomRight;  // rows whose lse is the sink alone
  std::swap(c.nq, c.nk);
  CheckGradients(c);
}

TEST(ReferenceGradient, Dropout) {
  AttentionCase c = SmallCase();
  c.dropout_p = 0.4;
  c.philox_seed = 99;
  c.philox_offset = 3;
  CheckGradients(c);
}

TEST(ReferenceGradient, VariableLength) {
  AttentionCase c = SmallCase();
  c.lengths_q = {3, 0, 4, 1};
  c.lengths_k = {2, 3, 4, 0};
  for (const bool padded : {false, true}) {
    c.padded_lse = padded;
    c.dlse = !padded;  // the loss would need dlse in lse's shape
    for (const Causal causal :
         {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
      c.causal = causal;
      CheckGradients(c);
    }
  }
}

TEST(ReferenceGradient, EverythingAtOnce) {
  AttentionCase c = SmallCase();
  c.heads = 4;
  c.causal = Causal::kBottomRight;
  c.window_left = 4;
  c.softcap = 2.0;
  c.bias = DType::kF32;
  c.bias_broadcast = {true, false, false, false};
  c.bias_masked = 0.1;
  c.alibi = true;
  c.sinks = true;
  c.dropout_p = 0.3;
  c.philox_seed = 7;
  CheckGradients(c);
}

// A dense call of one batch and the same rows as packed sequences agree.
TEST(Reference, PackedSequencesEqualSeparateCalls) {
  AttentionCase packed = SmallCase();
  packed.lengths_q = {4, 6};
  packed.lengths_k = {5, 3};
  packed.causal = Causal::kBottomRight;
  const AttentionInputs inputs = MakeInputs(packed);
  const auto slice = [](const ConstTensorView& view, int64_t first,
                        int64_t rows) {
    ConstTensorView part = view;
    part.data = static_cast<const double*>(view.data) + first * view.strides[2];
    part.sizes[2] = rows;
    return part;
  };
  int64_t q_first = 0;
  int64_t k_first = 0;
  for (size_t n = 0; n < 2; ++n) {
    const int64_t nq = packed.lengths_q[n];
    const int64_t nk = packed.lengths_k[n];
    AttentionForwardArgs args;
    args.q = slice(inputs.q.view, q_first, nq);
    args.k = slice(inputs.k.view, k_first, nk);
    args.v = slice(inputs.v.view, k_first, nk);
    args.options.causal = packed.causal;
    const Tensor out =
        MakeTensor(DType::kF64, {1, packed.heads, nq, packed.value_dim});
    args.out = out.view;
    const Status status = AttentionReferenceForward(args);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(SameBits(out.view, [&] {
      ConstTensorView part = slice(inputs.out.view, q_first, nq);
      return part;
    }()));
    q_first += nq;
    k_first += nk;
  }
}

TEST(Reference, RowsThatSeeNoKey) {
  AttentionCase c = SmallCase();
  c.nq = 6;
  c.nk = 2;
  c.causal = Causal::kBottomRight;  // queries 0 to 3 see nothing
  const AttentionInputs inputs = MakeInputs(c);
  std::vector<AttentionOutputs> runs;
  for (const double lse : {-kInfinity, kInfinity, 0.0}) {
    for (int64_t i = 0; i < 4; ++i) {
      EXPECT_EQ(Get(inputs.out.view, {0, 0, i, 0}), 0.0);
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t h = 0; h < 2; ++h) {
          if (runs.empty()) {
            EXPECT_EQ(Get(inputs.lse.view, {b, h, i, 0}), -kInfinity);
          }
          Set(inputs.lse.view, {b, h, i, 0}, lse);
        }
      }
    }
    runs.push_back(MakeOutputs(c, inputs));
    const Status status =
        AttentionReferenceBackward(BackwardArgs(c, inputs, runs.back()));
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(Get(runs.back().dq.view, {1, 1, 3, 0}), 0.0);
    EXPECT_NE(Get(runs.back().dq.view, {1, 1, 4, 0}), 0.0);
    EXPECT_TRUE(SameBits(runs.back().dk.view, runs.front().dk.view));
    EXPECT_TRUE(SameBits(runs.back().dv.view, runs.front().dv.view));
  }
}

TEST(Reference, NanInMaskedKeysIsNeverRead) {
  AttentionCase c = SmallCase();
  c.causal = Causal::kTopLeft;  // keys 5 and 6 are past all queries
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs clean = MakeOutputs(c, inputs);
  ASSERT_TRUE(AttentionReferenceBackward(BackwardArgs(c, inputs, clean)).ok());
  ForEachIndex(inputs.k.view.sizes, [&](const Sizes& at) {
    if (at[2] >= 5) Set(inputs.k.view, at, std::nan(""));
  });
  ForEachIndex(inputs.v.view.sizes, [&](const Sizes& at) {
    if (at[2] >= 5) Set(inputs.v.view, at, kInfinity);
  });
  const AttentionOutputs dirty = MakeOutputs(c, inputs);
  ASSERT_TRUE(AttentionReferenceForward(ForwardArgs(inputs, dirty)).ok());
  EXPECT_TRUE(SameBits(dirty.out.view, inputs.out.view));
  ASSERT_TRUE(AttentionReferenceBackward(BackwardArgs(c, inputs, dirty)).ok());
  EXPECT_TRUE(SameBits(dirty.dq.view, clean.dq.view));
  EXPECT_TRUE(SameBits(dirty.dk.view, clean.dk.view));
  EXPECT_TRUE(SameBits(dirty.dv.view, clean.dv.view));
}

TEST(Reference, AccumulatesAndLeavesOut) {
  AttentionCase c = SmallCase();
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs plain = MakeOutputs(c, inputs);
  ASSERT_TRUE(AttentionReferenceBackward(BackwardArgs(c, inputs, plain)).ok());
  c.accumulate_dk = true;
  c.want_dv = false;
  const AttentionOutputs sum = MakeOutputs(c, inputs);
  const Tensor before = MakeTensor(DType::kF64, sum.dk.view.sizes);
  Copy(sum.dk.view, before.view);
  ASSERT_TRUE(AttentionReferenceBackward(BackwardArgs(c, inputs, sum)).ok());
  EXPECT_TRUE(SameBits(sum.dq.view, plain.dq.view));
  ForEachIndex(before.view.sizes, [&](const Sizes& at) {
    EXPECT_EQ(Get(sum.dk.view, at),
              Get(before.view, at) + Get(plain.dk.view, at));
  });
}

TEST(Reference, GivenDeltaReplacesOut) {
  AttentionCase c = SmallCase();
  const AttentionInputs from_out = MakeInputs(c);
  c.delta = true;
  const AttentionInputs from_delta = MakeInputs(c);
  const AttentionOutputs a = MakeOutputs(c, from_out);
  const AttentionOutputs b = MakeOutputs(c, from_delta);
  ASSERT_TRUE(AttentionReferenceBackward(BackwardArgs(c, from_out, a)).ok());
  ASSERT_TRUE(AttentionReferenceBackward(BackwardArgs(c, from_delta, b)).ok());
  EXPECT_LE(ErrorOf(a.dq.view, b.dq.view).relative_l2(), 1e-15);
  EXPECT_LE(ErrorOf(a.dk.view, b.dk.view).relative_l2(), 1e-15);
}

TEST(Reference, RefusesShapesThatDoNotFit) {
  const AttentionCase c = SmallCase();
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  AttentionForwardArgs args = ForwardArgs(inputs, outputs);
  args.k.sizes[3] = 3;
  const Status status = AttentionReferenceForward(args);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("k is f64 [2, 2, 7, 3]"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace fa2::test
