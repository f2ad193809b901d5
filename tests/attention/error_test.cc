// SPDX-License-Identifier: Apache-2.0

// Bad calls: each gives a status whose sentence names the argument, and writes
// nothing.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fa2/attention.h"
#include "tests/support/attention_case.h"

namespace fa2::test {
namespace {

AttentionCase BaseCase() {
  AttentionCase c;
  c.heads = 4;
  c.kv_heads = 2;
  c.nq = 9;
  c.nk = 7;
  c.head_dim = 8;
  c.value_dim = 6;
  return c;
}

void ExpectSentence(const Status& status, const std::string& name,
                    const std::vector<std::string>& words) {
  EXPECT_TRUE(status.code() == StatusCode::kInvalidArgument ||
              status.code() == StatusCode::kUnsupported)
      << name << ": code " << static_cast<int>(status.code());
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << name << ": no '" << word << "' in: " << status.message();
  }
}

struct BadForward {
  std::string name;
  std::vector<std::string> words;  // that the sentence must hold
  std::function<void(AttentionForwardArgs*)> change;
};

struct BadBackward {
  std::string name;
  std::vector<std::string> words;
  std::function<void(AttentionBackwardArgs*)> change;
};

void ExpectRefused(const AttentionCase& c, const BadForward& bad) {
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  AttentionForwardArgs args = ForwardArgs(inputs, outputs);
  ASSERT_TRUE(AttentionForward(args).ok()) << bad.name;
  bad.change(&args);
  outputs.out.buffer->Snapshot();
  outputs.lse.buffer->Snapshot();
  for (const auto& buffer : inputs.Buffers()) buffer->Snapshot();
  ExpectSentence(AttentionForward(args), bad.name, bad.words);
  EXPECT_FALSE(outputs.out.buffer->ChangedOutside({})) << bad.name;
  EXPECT_FALSE(outputs.lse.buffer->ChangedOutside({})) << bad.name;
  for (const auto& buffer : inputs.Buffers()) {
    EXPECT_FALSE(buffer->ChangedOutside({})) << bad.name;
  }
}

void ExpectRefused(const AttentionCase& c, const BadBackward& bad) {
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  AttentionBackwardArgs args = BackwardArgs(c, inputs, outputs);
  const Status good = AttentionBackward(args);
  ASSERT_TRUE(good.ok()) << bad.name << ": " << good.message();
  bad.change(&args);
  const std::vector<const Tensor*> written = {&outputs.dq, &outputs.dk,
                                              &outputs.dv};
  for (const Tensor* t : written) t->buffer->Snapshot();
  for (const auto& buffer : inputs.Buffers()) buffer->Snapshot();
  ExpectSentence(AttentionBackward(args), bad.name, bad.words);
  for (const Tensor* t : written) {
    EXPECT_FALSE(t->buffer->ChangedOutside({})) << bad.name;
  }
  for (const auto& buffer : inputs.Buffers()) {
    EXPECT_FALSE(buffer->ChangedOutside({})) << bad.name;
  }
}

using Forward = AttentionForwardArgs;
using Backward = AttentionBackwardArgs;

TEST(AttentionError, Tensors) {
  const std::vector<BadForward> calls = {
      {"null q", {"q"}, [](Forward* a) { a->q.data = nullptr; }},
      {"null k", {"k"}, [](Forward* a) { a->k.data = nullptr; }},
      {"null v", {"v"}, [](Forward* a) { a->v.data = nullptr; }},
      {"null out", {"out"}, [](Forward* a) { a->out.data = nullptr; }},
      {"mixed dtypes",
       {"k", "f16", "f32"},
       [](Forward* a) { a->k.dtype = DType::kF16; }},
      {"integers",
       {"q", "i32"},
       [](Forward* a) { a->q.dtype = a->k.dtype = a->v.dtype = DType::kI32; }},
      {"lse in bf16",
       {"lse", "bf16"},
       [](Forward* a) { a->lse.dtype = DType::kBF16; }},
      {"out in f16",
       {"out", "f16"},
       [](Forward* a) { a->out.dtype = DType::kF16; }},
      {"head_dim of k",
       {"k", "[1, 2, 7, 7]", "8"},
       [](Forward* a) { a->k.sizes[3] = 7; }},
      {"rows of v",
       {"v", "k", "[1, 2, 6, 6]"},
       [](Forward* a) { a->v.sizes[2] = 6; }},
      {"batch of k",
       {"k", "[2, 2, 7, 8]"},
       [](Forward* a) { a->k.sizes[0] = 2; }},
      {"heads of v",
       {"v", "[1, 1, 7, 6]"},
       [](Forward* a) { a->v.sizes[1] = 1; }},
      {"rows of out",
       {"out", "[1, 4, 8, 6]"},
       [](Forward* a) { a->out.sizes[2] = 8; }},
      {"columns of lse",
       {"lse", "[1, 4, 9, 2]"},
       [](Forward* a) { a->lse.sizes[3] = 2; }},
      {"negative size", {"q", "-9"}, [](Forward* a) { a->q.sizes[2] = -9; }},
      {"heads that do not group",
       {"q", "4", "3"},
       [](Forward* a) { a->k.sizes[1] = a->v.sizes[1] = 3; }},
      {"no kv heads",
       {"4", "0"},
       [](Forward* a) { a->k.sizes[1] = a->v.sizes[1] = 0; }},
      {"sizes that overflow",
       {"q"},
       [](Forward* a) {
         a->q.sizes[0] = a->k.sizes[0] = a->v.sizes[0] = a->out.sizes[0] =
             a->lse.sizes[0] = int64_t{1} << 40;
         a->q.sizes[2] = a->out.sizes[2] = a->lse.sizes[2] = int64_t{1} << 40;
       }},
  };
  for (const BadForward& bad : calls) ExpectRefused(BaseCase(), bad);
}

TEST(AttentionError, Numbers) {
  const double nan = std::nan("");
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<BadForward> calls = {
      {"scale NaN",
       {"scale", "nan"},
       [=](Forward* a) { a->options.scale = nan; }},
      {"scale inf",
       {"scale", "inf"},
       [=](Forward* a) { a->options.scale = infinity; }},
      {"softcap negative",
       {"softcap", "-1"},
       [](Forward* a) { a->options.softcap = -1.0; }},
      {"softcap inf",
       {"softcap", "inf"},
       [=](Forward* a) { a->options.softcap = infinity; }},
      {"softcap NaN",
       {"softcap", "nan"},
       [=](Forward* a) { a->options.softcap = nan; }},
      {"window_left",
       {"window_left", "-2"},
       [](Forward* a) { a->options.window_left = -2; }},
      {"window_right",
       {"window_right", "-5"},
       [](Forward* a) { a->options.window_right = -5; }},
      {"dropout over 1",
       {"dropout_p", "1.5"},
       [](Forward* a) { a->options.dropout_p = 1.5; }},
      {"dropout under 0",
       {"dropout_p", "-0.1"},
       [](Forward* a) { a->options.dropout_p = -0.1; }},
      {"dropout NaN",
       {"dropout_p", "nan"},
       [=](Forward* a) { a->options.dropout_p = nan; }},
      {"causal",
       {"causal", "7"},
       [](Forward* a) { a->options.causal = static_cast<Causal>(7); }},
      {"precision",
       {"precision", "9"},
       [](Forward* a) { a->options.precision = static_cast<Precision>(9); }},
  };
  for (const BadForward& bad : calls) ExpectRefused(BaseCase(), bad);
}

TEST(AttentionError, Overlap) {
  const std::vector<BadForward> forward = {
      {"out is q",
       {"out", "q"},
       [](Forward* a) { a->out.data = const_cast<void*>(a->q.data); }},
      {"out over v",
       {"out", "v"},
       [](Forward* a) {
         a->out.data = static_cast<float*>(const_cast<void*>(a->v.data)) + 10;
       }},
      {"lse in out",
       {"lse", "out"},
       [](Forward* a) { a->lse.data = a->out.data; }},
      {"out with stride 0", {"out"}, [](Forward* a) { a->out.strides[2] = 0; }},
      {"lse with stride 0", {"lse"}, [](Forward* a) { a->lse.strides[1] = 0; }},
  };
  for (const BadForward& bad : forward) ExpectRefused(BaseCase(), bad);
  const std::vector<BadBackward> backward = {
      {"dk is dv", {"dk", "dv"}, [](Backward* a) { a->dv.data = a->dk.data; }},
      {"dq is dout",
       {"dq", "dout"},
       [](Backward* a) { a->dq.data = const_cast<void*>(a->dout.data); }},
      {"dq with stride 0", {"dq"}, [](Backward* a) { a->dq.strides[2] = 0; }},
  };
  for (const BadBackward& bad : backward) ExpectRefused(BaseCase(), bad);
}

TEST(AttentionError, Backward) {
  const std::vector<BadBackward> calls = {
      {"null dout", {"dout"}, [](Backward* a) { a->dout.data = nullptr; }},
      {"null lse", {"lse"}, [](Backward* a) { a->lse.data = nullptr; }},
      {"neither out nor delta",
       {"out"},
       [](Backward* a) { a->out.data = nullptr; }},
      {"dtype of dout",
       {"dout", "bf16", "f32"},
       [](Backward* a) { a->dout.dtype = DType::kBF16; }},
      {"shape of dout",
       {"dout", "[1, 4, 9, 5]"},
       [](Backward* a) { a->dout.sizes[3] = 5; }},
      {"shape of dq",
       {"dq", "[1, 4, 9, 7]"},
       [](Backward* a) { a->dq.sizes[3] = 7; }},
      {"shape of dk",
       {"dk", "[1, 2, 6, 8]"},
       [](Backward* a) { a->dk.sizes[2] = 6; }},
      {"shape of dv",
       {"dv", "[1, 2, 7, 8]"},
       [](Backward* a) { a->dv.sizes[3] = 8; }},
      {"dtype of dk",
       {"dk", "f16"},
       [](Backward* a) { a->dk.dtype = DType::kF16; }},
      {"dtype of lse",
       {"lse", "f64"},
       [](Backward* a) { a->lse.dtype = DType::kF64; }},
      {"dbias without bias",
       {"dbias", "bias"},
       [](Backward* a) {
         a->dbias = a->dq;
         a->dq = TensorView();
       }},
      {"dsinks without sinks",
       {"dsinks", "sinks"},
       [](Backward* a) {
         a->dsinks = a->dq;
         a->dq = TensorView();
       }},
      {"dalibi_slopes without slopes",
       {"alibi_slopes"},
       [](Backward* a) {
         a->dalibi_slopes = a->dq;
         a->dq = TensorView();
       }},
  };
  for (const BadBackward& bad : calls) ExpectRefused(BaseCase(), bad);
}

TEST(AttentionError, Options) {
  AttentionCase with_bias = BaseCase();
  with_bias.bias = DType::kF32;
  for (const BadForward& bad : std::vector<BadForward>{
           {"rows of bias",
            {"bias", "[1, 4, 8, 7]"},
            [](Forward* a) { a->options.bias.sizes[2] = 8; }},
           {"dtype of bias",
            {"bias", "i64"},
            [](Forward* a) { a->options.bias.dtype = DType::kI64; }},
           {"out over bias", {"out", "bias"}, [](Forward* a) {
              a->out.data = const_cast<void*>(a->options.bias.data);
            }}}) {
    ExpectRefused(with_bias, bad);
  }
  AttentionCase with_vectors = BaseCase();
  with_vectors.alibi = with_vectors.sinks = true;
  for (const BadForward& bad : std::vector<BadForward>{
           {"heads of slopes",
            {"alibi_slopes", "[1, 3, 1, 1]"},
            [](Forward* a) { a->options.alibi_slopes.sizes[1] = 3; }},
           {"heads of sinks",
            {"sinks", "[1, 5, 1, 1]"},
            [](Forward* a) { a->options.sinks.sizes[1] = 5; }},
           {"dtype of sinks", {"sinks", "bf16"}, [](Forward* a) {
              a->options.sinks.dtype = DType::kBF16;
            }}}) {
    ExpectRefused(with_vectors, bad);
  }
}

TEST(AttentionError, PackedSequences) {
  AttentionCase c = BaseCase();
  c.lengths_q = {3, 4, 2};
  c.lengths_k = {2, 0, 5};
  static int32_t descending[] = {0, 5, 4, 9};
  static int32_t late[] = {1, 3, 7, 9};
  static int32_t beyond[] = {0, 3, 7, 10};
  static int32_t two[] = {0, 4, 7};
  for (const BadForward& bad : std::vector<BadForward>{
           {"one of two",
            {"cu_seqlens_k"},
            [](Forward* a) { a->options.cu_seqlens_k = ConstTensorView(); }},
           {"lengths differ",
            {"cu_seqlens_k has 3", "must have 4", "cu_seqlens_q"},
            [](Forward* a) {
              a->options.cu_seqlens_k.sizes[3] = 3;
              a->options.cu_seqlens_k.data = two;
            }},
           {"descending",
            {"cu_seqlens_q", "4"},
            [](Forward* a) { a->options.cu_seqlens_q.data = descending; }},
           {"not from 0",
            {"cu_seqlens_q", "1"},
            [](Forward* a) { a->options.cu_seqlens_q.data = late; }},
           {"beyond the rows",
            {"cu_seqlens_q", "10", "9"},
            [](Forward* a) { a->options.cu_seqlens_q.data = beyond; }},
           {"floats",
            {"cu_seqlens_q", "f32"},
            [](Forward* a) { a->options.cu_seqlens_q.dtype = DType::kF32; }},
           {"max_seqlen_q too small",
            {"max_seqlen_q", "3", "4"},
            [](Forward* a) { a->options.max_seqlen_q = 3; }}}) {
    ExpectRefused(c, bad);
  }
}

}  // namespace
}  // namespace fa2::test
