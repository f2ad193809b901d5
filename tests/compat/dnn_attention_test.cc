// SPDX-License-Identifier: Apache-2.0

// The typed flash-attention backward of a cuDNN-like library: its
// checks, and its gradients against the float64 oracle.
#include "fa2/compat/dnn_attention.h"

#include <array>
#include <limits>
#include <string>
#include <vector>

#include "tests/compat/expect.h"

namespace fa2::test {
namespace {

enum Argument { kQ, kK, kV, kO, kDO, kLse, kDQ, kDK, kDV, kArguments };

struct Call {
  fa2_dnn_flash_attention_config config = {};
  std::array<Tensor, kArguments> tensors;
  std::array<fa2_dnn_tensor, kArguments> t = {};
  Truth truth;

  fa2_status Run() const {
    return fa2_dnn_flash_attention_backward(&config, &t[kQ], &t[kK], &t[kV],
                                            &t[kO], &t[kDO], &t[kLse], &t[kDQ],
                                            &t[kDK], &t[kDV], nullptr);
  }
};

struct Case {
  DType dtype = DType::kF32;
  int64_t batch = 2, heads = 4, kv_heads = 2, queries = 37, keys = 53, dim = 48;
  bool causal = false;
  Layout layout = Layout::kBhsd;
  int32_t lse_rank = 4;
};

// The tensors own the sizes and strides that the descriptors point to, so a
// call must not be copied.
void Fill(const Case& c, Call* call) {
  Random random(11);
  const Sizes q = {c.batch, c.heads, c.queries, c.dim};
  const Sizes kv = {c.batch, c.kv_heads, c.keys, c.dim};
  auto& tensors = call->tensors;
  tensors[kQ] = MakeNormal(c.dtype, q, random, c.layout);
  tensors[kK] = MakeNormal(c.dtype, kv, random, c.layout);
  tensors[kV] = MakeNormal(c.dtype, kv, random, c.layout);
  tensors[kDO] = MakeNormal(c.dtype, q, random, c.layout);
  AttentionBackwardArgs args;
  args.q = tensors[kQ].view;
  args.k = tensors[kK].view;
  args.v = tensors[kV].view;
  args.dout = tensors[kDO].view;
  args.options.scale = 0.125;
  if (c.causal) args.options.causal = Causal::kTopLeft;
  call->truth = ComputeTruth(args, c.dtype, c.layout);

  tensors[kO] = call->truth.out;
  tensors[kLse] = call->truth.lse;
  tensors[kDQ] = MakeTensor(c.dtype, q, c.layout);
  tensors[kDK] = MakeTensor(c.dtype, kv, c.layout);
  tensors[kDV] = MakeTensor(c.dtype, kv, c.layout);
  for (size_t i = 0; i < kArguments; ++i) {
    tensors[i].buffer->Snapshot();
    TensorView& view = tensors[i].view;
    call->t[i] = {view.data, static_cast<int32_t>(view.dtype), 4,
                  view.sizes.data(), view.strides.data()};
  }
  call->t[kLse].rank = c.lse_rank;
  call->config = {static_cast<uint32_t>(c.dim),
                  static_cast<uint32_t>(c.queries),
                  static_cast<uint32_t>(c.keys),
                  64,
                  64,
                  c.causal ? 1u : 0u,
                  0.125f};
}

void RunAndCheck(const Case& c) {
  SCOPED_TRACE(std::string(NameOf(c.dtype)) + (c.causal ? " causal " : " ") +
               NameOf(c.layout));
  Call call;
  Fill(c, &call);
  ASSERT_EQ(call.Run(), FA2_OK) << fa2_last_error();
  const double bound = Bound(c.dtype, c.dtype);
  ExpectGradient("d_q", call.tensors[kDQ].view, call.truth.dq.view, bound);
  ExpectGradient("d_k", call.tensors[kDK].view, call.truth.dk.view, bound);
  ExpectGradient("d_v", call.tensors[kDV].view, call.truth.dv.view, bound);
}

TEST(DnnFlashAttentionBackward, ElementTypes) {
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const bool causal : {false, true}) {
      Case c;
      c.dtype = dtype;
      c.causal = causal;
      RunAndCheck(c);
    }
  }
}

TEST(DnnFlashAttentionBackward, StridesAndRankOfLogsumexp) {
  Case c;
  c.layout = Layout::kBshd;
  c.lse_rank = 3;
  RunAndCheck(c);
}

TEST(DnnFlashAttentionBackward, NoStridesMeansDense) {
  Call call;
  Fill({}, &call);
  for (fa2_dnn_tensor& tensor : call.t) tensor.strides = nullptr;
  ASSERT_EQ(call.Run(), FA2_OK) << fa2_last_error();
  ExpectGradient("d_q", call.tensors[kDQ].view, call.truth.dq.view,
                 Bound(DType::kF32, DType::kF32));
}

TEST(DnnFlashAttentionBackward, BlockSizesAreHints) {
  Call call;
  Fill({}, &call);
  call.config.block_m = 0;
  call.config.block_n = 12345;
  ASSERT_EQ(call.Run(), FA2_OK) << fa2_last_error();
}

TEST(DnnFlashAttentionBackward, Refusals) {
  const auto expect = [](const std::vector<const char*>& texts,
                         const auto& change) {
    Call call;
    Fill({}, &call);
    change(call);
    for (const char* text : texts) EXPECT_REFUSED(call.Run(), text);
    for (const Argument output : {kDQ, kDK, kDV})
      EXPECT_FALSE(call.tensors[output].buffer->ChangedOutside({}));
  };
  const char* const names[kArguments] = {
      "q", "k", "v", "output", "d_output", "logsumexp", "d_q", "d_k", "d_v"};
  for (size_t i = 0; i < kArguments; ++i) {
    const std::string name = names[i];
    expect({(name + " is 2-D").c_str()}, [i](Call& c) { c.t[i].rank = 2; });
    expect({(name + " is 5-D").c_str()}, [i](Call& c) { c.t[i].rank = 5; });
    expect({(name + " is NULL").c_str()},
           [i](Call& c) { c.t[i].data = nullptr; });
    expect({(name + ".dims is NULL").c_str()},
           [i](Call& c) { c.t[i].dims = nullptr; });
    expect({(name + ".dims[2] is -1").c_str()},
           [i](Call& c) { c.tensors[i].view.sizes[2] = -1; });
    expect({(name + ".dtype is 4").c_str()},
           [i](Call& c) { c.t[i].dtype = FA2_BOOL; });
    expect({(name + " is misaligned").c_str()}, [i](Call& c) {
      c.t[i].data = static_cast<uint8_t*>(c.t[i].data) + 1;
    });
    if (i != kLse) {
      expect({(name + " is 3-D").c_str()}, [i](Call& c) { c.t[i].rank = 3; });
    }
  }
  // Both names and both shapes.
  expect({"d_q is [2, 4, 36, 48]", "q, [2, 4, 37, 48]"},
         [](Call& c) { c.tensors[kDQ].view.sizes[2] = 36; });
  expect({"output is [2, 4, 37, 47]", "q, [2, 4, 37, 48]"},
         [](Call& c) { c.tensors[kO].view.sizes[3] = 47; });
  expect({"d_output is [1, 4, 37, 48]", "q, [2, 4, 37, 48]"},
         [](Call& c) { c.tensors[kDO].view.sizes[0] = 1; });
  expect({"d_k is [2, 1, 53, 48]", "k, [2, 2, 53, 48]"},
         [](Call& c) { c.tensors[kDK].view.sizes[1] = 1; });
  expect({"d_v is [2, 2, 52, 48]", "v, [2, 2, 53, 48]"},
         [](Call& c) { c.tensors[kDV].view.sizes[2] = 52; });
  expect({"q [2, 4, 37, 48] is 48", "head_dim of the config, 64"},
         [](Call& c) { c.config.head_dim = 64; });
  expect({"q [2, 4, 37, 48] is 37", "seq_len_q of the config, 38"},
         [](Call& c) { c.config.seq_len_q = 38; });
  expect({"k [2, 2, 53, 48] is 53", "seq_len_kv of the config, 52"},
         [](Call& c) { c.config.seq_len_kv = 52; });
  expect({"scale"}, [](Call& c) {
    c.config.sm_scale = std::numeric_limits<float>::quiet_NaN();
  });
  expect({"k"}, [](Call& c) {
    for (const Argument a : {kK, kDK, kV, kDV}) {
      c.tensors[a].view.sizes[1] = 3;  // 4 query heads
      c.t[a].strides = nullptr;
    }
  });
  expect({"lse"}, [](Call& c) { c.tensors[kLse].view.sizes[2] = 36; });
  Call call;
  Fill({}, &call);
  EXPECT_REFUSED(fa2_dnn_flash_attention_backward(
                     nullptr, &call.t[kQ], &call.t[kK], &call.t[kV],
                     &call.t[kO], &call.t[kDO], &call.t[kLse], &call.t[kDQ],
                     &call.t[kDK], &call.t[kDV], nullptr),
                 "config is NULL");
  EXPECT_REFUSED(fa2_dnn_flash_attention_backward(
                     &call.config, &call.t[kQ], nullptr, &call.t[kV],
                     &call.t[kO], &call.t[kDO], &call.t[kLse], &call.t[kDQ],
                     &call.t[kDK], &call.t[kDV], nullptr),
                 "k is NULL");
}

}  // namespace
}  // namespace fa2::test
