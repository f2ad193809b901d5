// SPDX-License-Identifier: Apache-2.0

// The memory-efficient attention backward of a large CUDA framework, by
// its parameters, against the float64 oracle.
#include "fa2/compat/mem_efficient_attention.h"

#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/compat/expect.h"
#include "tests/compat/mem_efficient_case.h"

namespace fa2::test {
namespace {

MemEfficientCall RunAndCheck(const MemEfficientCase& c) {
  MemEfficientCall call = MakeMemEfficientCall(c);
  EXPECT_FA2_OK(call.Run());
  ExpectMemEfficientGradients(c, call);
  return call;
}

MemEfficientCase Small(DType dtype) {
  MemEfficientCase c;
  c.dtype = dtype;
  c.batch = 2;
  c.queries = 37;
  c.keys = 53;
  c.heads = 3;
  c.dim = 40;
  c.value_dim = 72;
  return c;
}

TEST(MemEfficientBackward, DTypes) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(NameOf(dtype));
    RunAndCheck(Small(dtype));
  }
}

TEST(MemEfficientBackward, Masks) {
  for (const int32_t type : {0, 1, 2}) {
    for (const auto& [queries, keys] : std::vector<std::pair<int32_t, int32_t>>{
             {37, 53}, {53, 37}, {64, 64}, {2, 65}, {65, 2}, {130, 65}}) {
      MemEfficientCase c = Small(DType::kF32);
      c.queries = queries;
      c.keys = keys;
      c.mask_type = type;
      SCOPED_TRACE(std::to_string(type) + ": " + std::to_string(queries) + "x" +
                   std::to_string(keys));
      RunAndCheck(c);
    }
  }
}

// A query sees at most the w keys that end at its diagonal, on either diagonal.
TEST(MemEfficientBackward, Windows) {
  for (const int32_t type : {1, 2}) {
    for (const int32_t window : {2, 16, 17, 33, 1000}) {
      for (const auto& [queries, keys] :
           std::vector<std::pair<int32_t, int32_t>>{
               {70, 70}, {45, 91}, {91, 45}}) {
        MemEfficientCase c = Small(DType::kF32);
        c.queries = queries;
        c.keys = keys;
        c.mask_type = type;
        c.window = window;
        SCOPED_TRACE(std::to_string(type) + " w" + std::to_string(window) +
                     ": " + std::to_string(queries) + "x" +
                     std::to_string(keys));
        RunAndCheck(c);
      }
    }
  }
}

TEST(MemEfficientBackward, WindowOfNoSizeIsNone) {
  MemEfficientCall call = MakeMemEfficientCall(Small(DType::kF32));
  call.params.window_size = -1;
  EXPECT_FA2_OK(call.Run());
  ExpectMemEfficientGradients(Small(DType::kF32), call);
}

TEST(MemEfficientBackward, KeysThatNoQuerySeesGetZeros) {
  MemEfficientCase c = Small(DType::kBF16);
  c.mask_type = 1;
  const MemEfficientCall call = RunAndCheck(c);
  for (const Tensor* tensor : {&call.dk, &call.dv}) {
    Sizes sizes = tensor->view.sizes;
    sizes[2] = c.keys - c.queries;
    ForEachIndex(sizes, [&](Sizes at) {
      at[2] += c.queries;
      EXPECT_EQ(Get(tensor->view, at), 0.0);
    });
  }
}

TEST(MemEfficientBackward, BiasAndItsGradient) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(NameOf(dtype));
    MemEfficientCase c = Small(dtype);
    c.bias = true;
    RunAndCheck(c);
  }
}

// Every element of grad_bias is written, also where whole tiles are masked.
TEST(MemEfficientBackward, GradBiasIsZeroWhereMasked) {
  for (const auto& [queries, keys] :
       std::vector<std::pair<int32_t, int32_t>>{{37, 201}, {201, 37}}) {
    for (const int32_t type : {1, 2}) {
      MemEfficientCase c = Small(DType::kF32);
      c.batch = 1;
      c.queries = queries;
      c.keys = keys;
      c.mask_type = type;
      c.bias = true;
      const MemEfficientCall call = RunAndCheck(c);
      const int64_t shift = type == 2 ? keys - queries : 0;
      ForEachIndex(call.dbias.view.sizes, [&](const Sizes& at) {
        if (at[3] > at[2] + shift) {
          ASSERT_EQ(Get(call.dbias.view, at), 0.0) << Text(at);
        }
      });
    }
  }
}

TEST(MemEfficientBackward, BiasThatBroadcastsByStrides) {
  MemEfficientCase c = Small(DType::kF32);
  c.bias = true;
  MemEfficientCall call = MakeMemEfficientCall(c);
  // The same bias for all heads: the oracle gets it written out.
  ForEachIndex(call.bias.view.sizes, [&](const Sizes& at) {
    Set(call.bias.view, at, Get(call.bias.view, {at[0], 0, at[2], at[3]}));
  });
  AttentionBackwardArgs args;
  args.q = call.q.view;
  args.k = call.k.view;
  args.v = call.v.view;
  args.dout = call.dout.view;
  args.options.scale = call.params.scale;
  args.options.bias = call.bias.view;
  call.truth = ComputeTruth(args, c.dtype, Layout::kBshd);
  Copy(call.truth.out.view, call.out.view);
  ForEachIndex(call.lse.view.sizes, [&](const Sizes& at) {
    Set(call.lse.view, at, Get(call.truth.lse.view, at));
  });
  call.params.bias_strides[1] = 0;
  EXPECT_FA2_OK(call.Run());
  ExpectMemEfficientGradients(c, call);
}

TEST(MemEfficientBackward, Dropout) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    MemEfficientCase c = Small(dtype);
    c.mask_type = 2;
    c.dropout = 0.3f;
    SCOPED_TRACE(NameOf(dtype));
    RunAndCheck(c);
  }
}

TEST(MemEfficientBackward, DropoutOfEverythingLeavesNoGradient) {
  MemEfficientCase c = Small(DType::kF32);
  c.dropout = 1.0f;
  MemEfficientCall call = MakeMemEfficientCall(c);
  EXPECT_FA2_OK(call.Run());
  for (const Tensor* tensor : {&call.dq, &call.dk, &call.dv}) {
    ForEachIndex(tensor->view.sizes, [&](const Sizes& at) {
      ASSERT_EQ(Get(tensor->view, at), 0.0);
    });
  }
}

TEST(MemEfficientBackward, PackedSequences) {
  for (const int32_t type : {0, 1, 2}) {
    for (const float dropout : {0.0f, 0.25f}) {
      MemEfficientCase c = Small(DType::kF32);
      c.lengths_q = {40, 0, 35, 45, 7};
      c.lengths_k = {50, 3, 21, 79, 0};
      c.mask_type = type;
      c.dropout = dropout;
      SCOPED_TRACE(std::to_string(type) + " p" + std::to_string(dropout));
      RunAndCheck(c);
    }
  }
}

// dQ, dK and dV as slices of one array: row stride 3 * H * K.
TEST(MemEfficientBackward, PackedGradients) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    MemEfficientCase c = Small(dtype);
    c.keys = c.queries;
    c.value_dim = c.dim;
    c.mask_type = 1;
    c.packed_gradients = true;
    const MemEfficientCall call = RunAndCheck(c);
    EXPECT_EQ(call.params.gQ_strides[1], 3 * c.heads * c.dim);
  }
}

TEST(MemEfficientBackward, SplitsOfKeysChangeNothing) {
  MemEfficientCase c = Small(DType::kBF16);
  c.keys = 300;
  const MemEfficientCall one = RunAndCheck(c);
  MemEfficientCall five = MakeMemEfficientCall(c);
  five.params.num_splits_key = 5;
  EXPECT_FA2_OK(five.Run());
  EXPECT_TRUE(SameBits(one.dq.view, five.dq.view));
  EXPECT_TRUE(SameBits(one.dk.view, five.dk.view));
  EXPECT_TRUE(SameBits(one.dv.view, five.dv.view));
}

TEST(MemEfficientBackward, HeadDimAtItsLimit) {
  MemEfficientCase c;
  c.queries = 3;
  c.keys = 5;
  c.dim = 65536;
  c.value_dim = 8;
  RunAndCheck(c);
}

using Change = void (*)(MemEfficientCall&);

struct Refusal {
  const char* text;
  Change change;
};

void ExpectRefusals(const MemEfficientCase& c,
                    const std::vector<Refusal>& refusals) {
  for (const Refusal& refusal : refusals) {
    MemEfficientCall call = MakeMemEfficientCall(c);
    refusal.change(call);
    EXPECT_REFUSED(call.Run(), refusal.text);
    for (const Tensor* tensor : {&call.dq, &call.dk, &call.dv, &call.dbias}) {
      if (tensor->given()) {
        EXPECT_FALSE(tensor->buffer->ChangedOutside({})) << refusal.text;
      }
    }
  }
}

template <class T>
void Shift(T*& pointer, ptrdiff_t bytes) {
  pointer = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) +
                                 static_cast<uintptr_t>(bytes));
}

TEST(MemEfficientBackward, RefusesPointers) {
  MemEfficientCase c = Small(DType::kBF16);
  c.bias = true;
  ExpectRefusals(
      c,
      {{"query is NULL", [](auto& x) { x.params.query = nullptr; }},
       {"key is NULL", [](auto& x) { x.params.key = nullptr; }},
       {"value is NULL", [](auto& x) { x.params.value = nullptr; }},
       {"logsumexp is NULL", [](auto& x) { x.params.logsumexp = nullptr; }},
       {"output is NULL", [](auto& x) { x.params.output = nullptr; }},
       {"grad_output is NULL", [](auto& x) { x.params.grad_output = nullptr; }},
       {"grad_query is NULL", [](auto& x) { x.params.grad_query = nullptr; }},
       {"grad_key is NULL", [](auto& x) { x.params.grad_key = nullptr; }},
       {"grad_value is NULL", [](auto& x) { x.params.grad_value = nullptr; }},
       {"bias is NULL", [](auto& x) { x.params.bias = nullptr; }},
       {"query is misaligned by 1", [](auto& x) { Shift(x.params.query, 1); }},
       {"key is misaligned by 1", [](auto& x) { Shift(x.params.key, 1); }},
       {"value is misaligned by 1", [](auto& x) { Shift(x.params.value, 1); }},
       {"bias is misaligned by 1", [](auto& x) { Shift(x.params.bias, 1); }},
       {"logsumexp is misaligned by 2",
        [](auto& x) { Shift(x.params.logsumexp, 2); }},
       {"output is misaligned by 1",
        [](auto& x) { Shift(x.params.output, 1); }},
       {"grad_output is misaligned by 1",
        [](auto& x) { Shift(x.params.grad_output, 1); }},
       {"grad_query is misaligned by 1",
        [](auto& x) { Shift(x.params.grad_query, 1); }},
       {"grad_bias is misaligned by 1",
        [](auto& x) { Shift(x.params.grad_bias, 1); }}});
  EXPECT_REFUSED(fa2_mem_efficient_attention_backward(nullptr, nullptr),
                 "params is NULL");
}

TEST(MemEfficientBackward, RefusesExtents) {
  ExpectRefusals(
      Small(DType::kF32),
      {{"num_batches is 0", [](auto& x) { x.params.num_batches = 0; }},
       {"num_queries is -3", [](auto& x) { x.params.num_queries = -3; }},
       {"num_keys is 0", [](auto& x) { x.params.num_keys = 0; }},
       {"num_heads is 0", [](auto& x) { x.params.num_heads = 0; }},
       {"head_dim is 0", [](auto& x) { x.params.head_dim = 0; }},
       {"head_dim is 65537", [](auto& x) { x.params.head_dim = 65537; }},
       {"head_dim_value is 0", [](auto& x) { x.params.head_dim_value = 0; }},
       {"head_dim_value is 65537",
        [](auto& x) { x.params.head_dim_value = 65537; }}});
}

TEST(MemEfficientBackward, RefusesValues) {
  ExpectRefusals(
      Small(DType::kF32),
      {{"dtype is 3", [](auto& x) { x.params.dtype = FA2_F64; }},
       {"custom_mask_type is 3",
        [](auto& x) { x.params.custom_mask_type = 3; }},
       {"custom_mask_type is -1",
        [](auto& x) { x.params.custom_mask_type = -1; }},
       {"window_size is 5", [](auto& x) { x.params.window_size = 5; }},
       {"dropout_prob", [](auto& x) { x.params.dropout_prob = -0.1f; }},
       {"dropout_prob", [](auto& x) { x.params.dropout_prob = 1.5f; }},
       {"dropout_prob",
        [](auto& x) {
          x.params.dropout_prob = std::numeric_limits<float>::quiet_NaN();
        }},
       {"scale",
        [](auto& x) {
          x.params.scale = std::numeric_limits<float>::infinity();
        }},
       {"num_splits_key is 0", [](auto& x) { x.params.num_splits_key = 0; }},
       {"num_splits_key is 2", [](auto& x) { x.params.num_splits_key = 2; }},
       {"params.struct_size", [](auto& x) { x.params.struct_size = 8; }}});
}

TEST(MemEfficientBackward, RefusesSequences) {
  MemEfficientCase c = Small(DType::kF32);
  c.lengths_q = {10, 20};
  c.lengths_k = {30, 5};
  ExpectRefusals(
      c, {{"bias is given", [](auto& x) { x.params.bias = x.params.query; }},
          {"cu_seqlens_k is NULL",
           [](auto& x) { x.params.cu_seqlens_k = nullptr; }},
          {"cu_seqlens_q is NULL",
           [](auto& x) { x.params.cu_seqlens_q = nullptr; }},
          {"cu_seqlens_q is misaligned",
           [](auto& x) { Shift(x.params.cu_seqlens_q, 1); }},
          {"cu_seqlens_q[0] is 1", [](auto& x) { x.cu_q[0] = 1; }},
          {"cu_seqlens_q[2] is 9", [](auto& x) { x.cu_q[2] = 9; }},
          {"cu_seqlens_k[1] is 31", [](auto& x) { x.cu_k[1] = 31; }}});
}

}  // namespace
}  // namespace fa2::test
