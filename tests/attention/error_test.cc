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
      {"dtype of v",
       {"v", "f64", "f32"},
       [](Forward* a) { a->v.dtype = DType::kF64; }},
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
      {"null k", {"k"}, [](Backward* a) { a->k.data = nullptr; }},
      {"dtype of out",
       {"out", "f16", "f32"},
       [](Backward* a) { a->out.dtype = DType::kF16; }},
      {"shape of out",
       {"out", "[1, 4, 9, 5]"},
       [](Backward* a) { a->out.sizes[3] = 5; }},
      {"shape of delta",
       {"delta", "[1, 4, 8]"},
       [](Backward* a) {
         a->delta = a->lse;
         a->delta.sizes[2] = 8;
       }},
      {"dtype of dlse",
       {"dlse", "f64"},
       [](Backward* a) {
         a->dlse = a->lse;
         a->dlse.dtype = DType::kF64;
       }},
      {"dq without alignment",
       {"dq", "aligned to 4 bytes"},
       [](Backward* a) { a->dq.data = static_cast<char*>(a->dq.data) + 1; }},
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

TEST(AttentionError, GradientsOfOptions) {
  AttentionCase c = BaseCase();
  c.bias = DType::kBF16;
  c.alibi = c.sinks = true;
  c.want_dbias = c.want_dalibi = c.want_dsinks = true;
  for (const BadBackward& bad : std::vector<BadBackward>{
           {"dbias of a boolean mask",
            {"dbias", "a boolean mask"},
            [](Backward* a) { a->options.bias.dtype = DType::kBool; }},
           {"sizes of dbias",
            {"dbias", "[1, -4, 9, 7]"},
            [](Backward* a) { a->dbias.sizes[1] = -4; }},
           {"dtype of dbias",
            {"dbias", "f16", "bf16 or f32"},
            [](Backward* a) { a->dbias.dtype = DType::kF16; }},
           {"shape of dbias",
            {"dbias", "[1, 1, 9, 7]", "the shape of bias"},
            [](Backward* a) { a->dbias.sizes[1] = 1; }},
           {"dalibi_slopes without alignment",
            {"dalibi_slopes", "aligned to 4 bytes"},
            [](Backward* a) {
              a->dalibi_slopes.data =
                  static_cast<char*>(a->dalibi_slopes.data) + 2;
            }},
           {"dtype of dsinks",
            {"dsinks", "f64", "f32"},
            [](Backward* a) { a->dsinks.dtype = DType::kF64; }},
           {"shape of dsinks", {"dsinks", "[1, 2, 1, 1]"}, [](Backward* a) {
              a->dsinks.sizes[1] = 2;
            }}}) {
    ExpectRefused(c, bad);
  }
}

TEST(AttentionError, Options) {
  AttentionCase with_bias = BaseCase();
  with_bias.bias = DType::kF32;
  for (const BadForward& bad : std::vector<BadForward>{
           {"sizes of bias",
            {"bias", "[1, 4, -9, 7]"},
            [](Forward* a) { a->options.bias.sizes[2] = -9; }},
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
           {"slopes without alignment",
            {"alibi_slopes", "aligned to 4 bytes"},
            [](Forward* a) {
              a->options.alibi_slopes.data =
                  static_cast<const char*>(a->options.alibi_slopes.data) + 1;
            }},
           {"dtype of slopes",
            {"alibi_slopes", "f64", "f32"},
            [](Forward* a) { a->options.alibi_slopes.dtype = DType::kF64; }},
           {"sizes of sinks",
            {"sinks", "[1, 4, -1, 1]"},
            [](Forward* a) { a->options.sinks.sizes[2] = -1; }},
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
           {"the other of two",
            {"cu_seqlens_q is not given"},
            [](Forward* a) { a->options.cu_seqlens_q = ConstTensorView(); }},
           {"sizes of prefix sums",
            {"cu_seqlens_q", "-4"},
            [](Forward* a) { a->options.cu_seqlens_q.sizes[3] = -4; }},
           {"prefix sums of a batch",
            {"cu_seqlens_q", "[2, 1, 1, 4]", "[1, 1, 1, sequences + 1]"},
            [](Forward* a) { a->options.cu_seqlens_q.sizes[0] = 2; }},
           {"prefix sums of heads",
            {"cu_seqlens_q", "[1, 2, 1, 4]"},
            [](Forward* a) { a->options.cu_seqlens_q.sizes[1] = 2; }},
           {"prefix sums of rows",
            {"cu_seqlens_k", "[1, 1, 2, 4]"},
            [](Forward* a) { a->options.cu_seqlens_k.sizes[2] = 2; }},
           {"no prefix sums",
            {"cu_seqlens_q", "[1, 1, 1, 0]"},
            [](Forward* a) { a->options.cu_seqlens_q.sizes[3] = 0; }},
           {"a batch of packed sequences",
            {"q has shape [2, 4, 9, 8]", "batch must be 1"},
            [](Forward* a) {
              a->q.sizes[0] = a->k.sizes[0] = a->v.sizes[0] = a->out.sizes[0] =
                  2;
              a->q.strides[0] = a->k.strides[0] = a->v.strides[0] = 0;
            }},
           {"a bias",
            {"bias", "packed sequences take no"},
            [](Forward* a) { a->options.bias = a->q; }},
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

// A block mask of the call, changed and handed over.
BadForward WithMask(const std::string& name,
                    const std::vector<std::string>& words,
                    const std::function<void(BlockMask*)>& change) {
  return {name, words, [change](Forward* a) {
            static BlockMask changed;
            changed = *a->options.block_mask;
            change(&changed);
            a->options.block_mask = &changed;
          }};
}

TEST(AttentionError, BlockMasks) {
  AttentionCase c = BaseCase();
  c.batch = 2;
  c.nq = 33;
  c.nk = 49;
  c.block_size = {16, 16};
  c.blocks_partial = 0.5;
  c.blocks_full = 0.3;
  c.block_bits = true;
  const auto indices_size = [](size_t dimension, int64_t n) {
    return [=](BlockMask* m) { m->kv_indices.sizes[dimension] = n; };
  };
  for (const BadForward& bad : std::vector<BadForward>{
           WithMask("no rows in a block", {"block_mask.block_q is 0"},
                    [](BlockMask* m) { m->block_q = 0; }),
           WithMask("too many rows in a block", {"block_k", "16 to 2^30"},
                    [](BlockMask* m) { m->block_k = int64_t{1} << 31; }),
           WithMask("batch of the numbers",
                    {"kv_num_blocks has shape [3, 4, 3]", "[2, 4, 3]"},
                    [](BlockMask* m) { m->kv_num_blocks.sizes[0] = 3; }),
           WithMask("heads of the numbers",
                    {"kv_num_blocks has shape [2, 3, 3]", "[2, 4, 3]"},
                    [](BlockMask* m) { m->kv_num_blocks.sizes[1] = 3; }),
           WithMask("sizes of the indices", {"kv_indices", "-4"},
                    indices_size(3, -4)),
           WithMask("batch of the indices", {"kv_indices", "[1, 4, 3, 4]"},
                    indices_size(0, 1)),
           WithMask("heads of the indices", {"kv_indices", "[2, 1, 3, 4]"},
                    indices_size(1, 1)),
           WithMask("rows of the indices", {"kv_indices", "[2, 4, 2, 4]"},
                    indices_size(2, 2)),
           WithMask("columns of the indices", {"kv_indices", "[2, 4, 3, 5]"},
                    indices_size(3, 5)),
           WithMask(
               "no numbers of full blocks", {"full_kv_num_blocks is not given"},
               [](BlockMask* m) { m->full_kv_num_blocks = ConstTensorView(); }),
           WithMask(
               "no indices of full blocks", {"full_kv_indices is not given"},
               [](BlockMask* m) { m->full_kv_indices = ConstTensorView(); }),
           WithMask("sizes of the bits", {"block_mask.bits", "-1"},
                    [](BlockMask* m) { m->bits.sizes[0] = -1; }),
           WithMask("bits apart", {"block_mask.bits", "last stride of 2"},
                    [](BlockMask* m) { m->bits.strides[3] = 2; })}) {
    ExpectRefused(c, bad);
  }
}

TEST(AttentionError, DeltaAndKeepMask) {
  const Tensor out = MakeTensor(DType::kBF16, {1, 2, 5, 8});
  const Tensor dout = MakeTensor(DType::kBF16, {1, 2, 5, 8});
  const Tensor delta = MakeTensor(DType::kF32, {1, 2, 5, 1});
  struct Bad {
    std::vector<std::string> words;
    std::function<void(TensorView*, TensorView*, TensorView*)> change;
  };
  using View = TensorView*;
  for (const Bad& bad : std::vector<Bad>{
           {{"dout is null"}, [](View, View d, View) { d->data = nullptr; }},
           {{"out has dtype i32"},
            [](View o, View, View) {
              o->dtype = DType::kI32;
              o->sizes[3] = 4;
            }},
           {{"dout has dtype f16", "as out has"},
            [](View, View d, View) { d->dtype = DType::kF16; }},
           {{"delta has dtype bf16", "f32"},
            [](View, View, View e) { e->dtype = DType::kBF16; }},
           {{"dout has shape [1, 2, 4, 8]"},
            [](View, View d, View) { d->sizes[2] = 4; }},
           {{"delta has shape [1, 2, 4]", "[1, 2, 5]"},
            [](View, View, View e) { e->sizes[2] = 4; }}}) {
    TensorView o = out.view, d = dout.view, e = delta.view;
    bad.change(&o, &d, &e);
    delta.buffer->Snapshot();
    ExpectSentence(AttentionDelta(o, d, e), "delta", bad.words);
    EXPECT_FALSE(delta.buffer->ChangedOutside({}));
  }
  const Tensor keep = MakeTensor(DType::kBool, {1, 2, 5, 7});
  keep.buffer->Snapshot();
  for (const double p : {-0.1, 1.5, std::nan("")}) {
    ExpectSentence(PhiloxKeepMask(p, 1, 0, keep.view), "p", {"dropout_p is"});
  }
  TensorView wrong = keep.view;
  wrong.data = nullptr;
  ExpectSentence(PhiloxKeepMask(0.5, 1, 0, wrong), "null", {"keep is null"});
  wrong = keep.view;
  wrong.dtype = DType::kU8;
  ExpectSentence(PhiloxKeepMask(0.5, 1, 0, wrong), "dtype", {"keep", "u8"});
  wrong = keep.view;
  wrong.strides[1] = 36;
  ExpectSentence(PhiloxKeepMask(0.5, 1, 0, wrong), "strides",
                 {"it must be dense, [70, 35, 7, 1]"});
  EXPECT_FALSE(keep.buffer->ChangedOutside({}));
}

}  // namespace
}  // namespace fa2::test
