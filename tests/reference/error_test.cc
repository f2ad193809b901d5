// SPDX-License-Identifier: Apache-2.0

// Wrong calls of the float64 oracle: each gives a status whose sentence names
// the argument, and writes nothing.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fa2/reference.h"
#include "tests/support/attention_case.h"

namespace fa2::test {
namespace {

using Forward = AttentionForwardArgs;
using Backward = AttentionBackwardArgs;

struct BadForward {
  std::vector<std::string> words;  // that the sentence must hold
  std::function<void(Forward*)> change;
};
struct BadBackward {
  std::vector<std::string> words;
  std::function<void(Backward*)> change;
};

AttentionCase BaseCase() {
  AttentionCase c;
  c.batch = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.nq = 9;
  c.nk = 7;
  c.head_dim = 8;
  c.value_dim = 6;
  return c;
}

AttentionCase PackedCase() {
  AttentionCase c = BaseCase();
  c.lengths_q = {3, 4, 2};
  c.lengths_k = {2, 0, 5};
  return c;
}

void ExpectSentence(const Status& status,
                    const std::vector<std::string>& words) {
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << words.front();
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << "no '" << word << "' in: " << status.message();
  }
}

void ExpectUntouched(const std::vector<const Tensor*>& outputs,
                     const std::string& name) {
  for (const Tensor* t : outputs) {
    if (!t->given()) continue;
    EXPECT_FALSE(t->buffer->ChangedOutside({})) << name;
  }
}

void ExpectRefused(const AttentionCase& c,
                   const std::vector<BadForward>& calls) {
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  const std::vector<const Tensor*> written = {&outputs.out, &outputs.lse};
  for (const Tensor* t : written) t->buffer->Snapshot();
  for (const BadForward& bad : calls) {
    Forward args = ForwardArgs(inputs, outputs);
    bad.change(&args);
    ExpectSentence(AttentionReferenceForward(args), bad.words);
    ExpectUntouched(written, bad.words.front());
  }
  EXPECT_TRUE(AttentionReferenceForward(ForwardArgs(inputs, outputs)).ok());
}

void ExpectRefused(const AttentionCase& c,
                   const std::vector<BadBackward>& calls) {
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  const std::vector<const Tensor*> written = {&outputs.dq, &outputs.dk,
                                              &outputs.dv};
  for (const Tensor* t : written) t->buffer->Snapshot();
  for (const BadBackward& bad : calls) {
    Backward args = BackwardArgs(c, inputs, outputs);
    bad.change(&args);
    ExpectSentence(AttentionReferenceBackward(args), bad.words);
    ExpectUntouched(written, bad.words.front());
  }
  EXPECT_TRUE(
      AttentionReferenceBackward(BackwardArgs(c, inputs, outputs)).ok());
}

TEST(ReferenceError, Tensors) {
  ExpectRefused(
      BaseCase(),
      {{{"q is not given"}, [](Forward* a) { a->q.data = nullptr; }},
       {{"k is not given"}, [](Forward* a) { a->k.data = nullptr; }},
       {{"v is not given"}, [](Forward* a) { a->v.data = nullptr; }},
       {{"out is not given"}, [](Forward* a) { a->out.data = nullptr; }},
       {{"q is i32"}, [](Forward* a) { a->q.dtype = DType::kI32; }},
       {{"v is u8"}, [](Forward* a) { a->v.dtype = DType::kU8; }},
       {{"k is f32 [2, 2, 7, 5]", "[2, 2, 7, 8]"},
        [](Forward* a) { a->k.sizes[3] = 5; }},
       {{"v is f32 [2, 1, 7, 6]"}, [](Forward* a) { a->v.sizes[1] = 1; }},
       {{"out is f32 [2, 4, 8, 6]"}, [](Forward* a) { a->out.sizes[2] = 8; }},
       {{"lse is f32 [2, 4, 9, 2]"}, [](Forward* a) { a->lse.sizes[3] = 2; }},
       {{"lse is bool"}, [](Forward* a) { a->lse.dtype = DType::kBool; }},
       {{"q has 4 heads", "multiple of k's 3"},
        [](Forward* a) { a->k.sizes[1] = a->v.sizes[1] = 3; }},
       {{"q has 4 heads", "multiple of k's 0"},
        [](Forward* a) { a->k.sizes[1] = a->v.sizes[1] = 0; }}});
}

TEST(ReferenceError, EmptyTensorsNeedNoMemory) {
  AttentionCase c = BaseCase();
  c.nq = 0;
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  Forward args = ForwardArgs(inputs, outputs);
  args.q.data = nullptr;
  args.out.data = nullptr;
  EXPECT_TRUE(AttentionReferenceForward(args).ok());
  args.q.sizes[1] = args.out.sizes[1] = args.lse.sizes[1] = 0;
  args.k.sizes[1] = args.v.sizes[1] = 0;
  EXPECT_TRUE(AttentionReferenceForward(args).ok());
}

TEST(ReferenceError, Gradients) {
  ExpectRefused(
      BaseCase(),
      {{{"k is not given"}, [](Backward* a) { a->k.data = nullptr; }},
       {{"dout is not given"}, [](Backward* a) { a->dout.data = nullptr; }},
       {{"out is not given"}, [](Backward* a) { a->out.data = nullptr; }},
       {{"lse is not given"}, [](Backward* a) { a->lse.data = nullptr; }},
       {{"dout is f32 [2, 4, 9, 5]"},
        [](Backward* a) { a->dout.sizes[3] = 5; }},
       {{"dlse is i64"},
        [](Backward* a) {
          a->dlse = a->lse;
          a->dlse.dtype = DType::kI64;
        }},
       {{"delta is f32 [2, 4, 8, 1]"},
        [](Backward* a) {
          a->delta = a->lse;
          a->delta.sizes[2] = 8;
        }},
       {{"dq is f32 [2, 4, 9, 7]"}, [](Backward* a) { a->dq.sizes[3] = 7; }},
       {{"dk is f32 [2, 2, 6, 8]"}, [](Backward* a) { a->dk.sizes[2] = 6; }},
       {{"dv is f32 [1, 2, 7, 6]"}, [](Backward* a) { a->dv.sizes[0] = 1; }},
       {{"dbias is f32"}, [](Backward* a) { a->dbias = a->dq; }},
       {{"dalibi_slopes is f32"},
        [](Backward* a) { a->dalibi_slopes = a->dq; }},
       {{"dsinks is f32"}, [](Backward* a) { a->dsinks = a->dq; }}});
}

TEST(ReferenceError, Options) {
  AttentionCase c = BaseCase();
  c.bias = DType::kF32;
  c.alibi = c.alibi_per_batch = c.sinks = true;
  ExpectRefused(
      c, {{{"bias is f32 [2, 4, 8, 7]", "broadcasts to [2, 4, 9, 7]"},
           [](Forward* a) { a->options.bias.sizes[2] = 8; }},
          {{"bias is i64"},
           [](Forward* a) { a->options.bias.dtype = DType::kI64; }},
          {{"alibi_slopes is f32 [2, 3, 1, 1]"},
           [](Forward* a) { a->options.alibi_slopes.sizes[1] = 3; }},
          {{"alibi_slopes is bool"},
           [](Forward* a) { a->options.alibi_slopes.dtype = DType::kBool; }},
          {{"sinks is f32 [1, 4, 2, 1]"},
           [](Forward* a) { a->options.sinks.sizes[2] = 2; }}});
}

TEST(ReferenceError, PackedSequences) {
  static const int32_t descending[] = {0, 5, 4, 9};
  static const int32_t late[] = {1, 3, 7, 9};
  static const int32_t beyond[] = {0, 3, 7, 10};
  const auto sums = [](const int32_t* data) {
    return [data](Forward* a) { a->options.cu_seqlens_q.data = data; };
  };
  const auto size = [](size_t dimension, int64_t n) {
    return [dimension, n](Forward* a) {
      a->options.cu_seqlens_q.sizes[dimension] = n;
    };
  };
  const std::string shape = "[1, 1, 1, sequences + 1]";
  ExpectRefused(
      PackedCase(),
      {{{"given together"},
        [](Forward* a) { a->options.cu_seqlens_k = ConstTensorView(); }},
       {{"given together"},
        [](Forward* a) { a->options.cu_seqlens_q = ConstTensorView(); }},
       {{"cu_seqlens_q[2] is 4", "ascend"}, sums(descending)},
       {{"cu_seqlens_q[0] is 1", "from 0"}, sums(late)},
       {{"cu_seqlens_q[3] is 10", "at most 9 rows"}, sums(beyond)},
       {{"cu_seqlens_q is f32", shape},
        [](Forward* a) { a->options.cu_seqlens_q.dtype = DType::kF32; }},
       {{"cu_seqlens_q is i32 [2, 1, 1, 4]", shape}, size(0, 2)},
       {{"cu_seqlens_q is i32 [1, 2, 1, 4]", shape}, size(1, 2)},
       {{"cu_seqlens_q is i32 [1, 1, 2, 4]", shape}, size(2, 2)},
       {{"cu_seqlens_q is i32 [1, 1, 1, 0]", shape}, size(3, 0)},
       {{"cu_seqlens_k is f64", shape},
        [](Forward* a) { a->options.cu_seqlens_k.dtype = DType::kF64; }},
       {{"the same length"}, size(3, 3)},
       {{"the batch size must be 1"},
        [](Forward* a) {
          for (auto* sizes :
               {&a->q.sizes, &a->k.sizes, &a->v.sizes, &a->out.sizes}) {
            (*sizes)[0] = 2;
          }
        }},
       {{"bias must not be given"},
        [](Forward* a) { a->options.bias = a->q; }}});
}

TEST(ReferenceError, PaddedStatistics) {
  AttentionCase c = PackedCase();
  c.padded_lse = true;
  const auto size = [](size_t dimension, int64_t n) {
    return [dimension, n](Forward* a) { a->lse.sizes[dimension] = n; };
  };
  ExpectRefused(
      c, std::vector<BadForward>{
             {{"lse is f32 [2, 4, 7, 1]", "[1, 4, 9, 1]"}, size(0, 2)},
             {{"lse is f32 [3, 3, 7, 1]"}, size(1, 3)},
             {{"lse is f32 [3, 4, 3, 1]"}, size(2, 3)},
             {{"lse is f32 [3, 4, 7, 2]"}, size(3, 2)},
             {{"lse is i32"}, [](Forward* a) { a->lse.dtype = DType::kI32; }}});
}

// A block mask of the call, changed and handed over.
BadForward WithMask(const std::vector<std::string>& words,
                    const std::function<void(BlockMask*)>& change) {
  return {words, [change](Forward* a) {
            static BlockMask changed;
            changed = *a->options.block_mask;
            change(&changed);
            a->options.block_mask = &changed;
          }};
}

TEST(ReferenceError, BlockMasks) {
  AttentionCase c = BaseCase();
  c.nq = 33;
  c.nk = 49;
  c.block_size = {16, 16};
  c.blocks_partial = 0.5;
  c.blocks_full = 0.3;
  c.block_bits = true;
  const auto partial_size = [](size_t dimension, int64_t n) {
    return
        [dimension, n](BlockMask* m) { m->kv_num_blocks.sizes[dimension] = n; };
  };
  const auto bits_size = [](size_t dimension) {
    return [dimension](BlockMask* m) { ++m->bits.sizes[dimension]; };
  };
  // Each row of these says so much, or begins with such a column.
  static const int32_t negative[] = {-1};
  static const int32_t many[] = {5};
  static const int32_t two[] = {2};
  static const int32_t repeated[] = {1, 1, 2, 3};
  static const int32_t beyond[] = {0, 4, 5, 6};
  static const int32_t below[] = {-1, 0, 1, 2};
  const auto counts = [](const int32_t* count) {
    return [count](BlockMask* m) {
      m->kv_num_blocks.data = count;
      m->kv_num_blocks.strides = {0, 0, 0, 0};
    };
  };
  const auto columns = [counts](const int32_t* list) {
    return [counts, list](BlockMask* m) {
      counts(two)(m);
      m->kv_indices.data = list;
      m->kv_indices.strides = {0, 0, 0, 1};
    };
  };
  const std::string size = "must be a multiple of 16 up to 2^30";
  const std::string shape = "kv_num_blocks must have numbers of blocks of";
  const std::string ascend = "columns that ascend from 0 to less than 4";
  const std::string bits = "bits must be u8 of [1, 1, ";
  ExpectRefused(
      c,
      {WithMask({"block of 0 rows", size},
                [](BlockMask* m) { m->block_q = 0; }),
       WithMask({"block of 24 rows", size},
                [](BlockMask* m) { m->block_k = 24; }),
       WithMask({"rows", size},
                [](BlockMask* m) { m->block_q = int64_t{1} << 31; }),
       WithMask({"kv_num_blocks must be i32"},
                [](BlockMask* m) { m->kv_num_blocks.dtype = DType::kI64; }),
       WithMask({"kv_num_blocks must be i32"},
                [](BlockMask* m) { m->kv_indices.dtype = DType::kF32; }),
       WithMask({shape, "[B or 1, H or 1, 3]"}, partial_size(0, 3)),
       WithMask({shape}, partial_size(1, 3)),
       WithMask({shape}, partial_size(2, 2)),
       WithMask({shape}, partial_size(3, 2)),
       WithMask({"indices of the first sizes of its numbers"},
                [](BlockMask* m) { m->kv_indices.sizes[1] = 1; }),
       WithMask({"at most 4 columns"},
                [](BlockMask* m) { m->kv_indices.sizes[3] = 5; }),
       WithMask({"as many blocks in a row as it says, not -1"},
                counts(negative)),
       WithMask({"as many blocks in a row as it says, not 5"}, counts(many)),
       WithMask({ascend}, columns(repeated)),
       WithMask({ascend}, columns(beyond)),
       WithMask({ascend}, columns(below)),
       WithMask({"given together"},
                [](BlockMask* m) { m->full_kv_indices = ConstTensorView(); }),
       WithMask(
           {"given together"},
           [](BlockMask* m) { m->full_kv_num_blocks = ConstTensorView(); }),
       WithMask({"full_kv_num_blocks must be i32"},
                [](BlockMask* m) { m->full_kv_num_blocks.dtype = DType::kU8; }),
       WithMask({"both lists must have as many rows"},
                [](BlockMask* m) {
                  m->full_kv_num_blocks.sizes[0] = 1;
                  m->full_kv_indices.sizes[0] = 1;
                }),
       WithMask({bits}, [](BlockMask* m) { m->bits.dtype = DType::kBool; }),
       WithMask({bits}, bits_size(0)),
       WithMask({bits}, bits_size(1)),
       WithMask({bits}, bits_size(2)),
       WithMask({bits}, bits_size(3))});
}

}  // namespace
}  // namespace fa2::test
