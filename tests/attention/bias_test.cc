// SPDX-License-Identifier: Apache-2.0

// Bias in every float dtype, of its own for every head: its gradient, elements
// that hide or are so large that they must be told from ordinary ones, and the
// same bits on any number of threads. Head dims whose kernels are unrolled.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "fa2/attention.h"
#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"

namespace fa2::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const std::vector<DType> kBiases = {DType::kF32, DType::kBF16, DType::kF16};

AttentionCase BaseCase(DType dtype, DType bias, int64_t dim) {
  AttentionCase c = GroupedCase(dtype, dim);
  c.bias = bias;
  c.want_dbias = true;
  return c;
}

TEST(AttentionBias, DtypesOfBias) {
  const Contexts contexts({1, 2});
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType bias : kBiases) {
      for (const int64_t dim : {64, 128, 256}) {
        if (dim != 64 && CasesOfSixteen() < 16 && dtype != DType::kBF16) {
          continue;
        }
        AttentionCase c = BaseCase(dtype, bias, dim);
        ExpectAttention(c, contexts.list());
        c.want_dbias = false;
        c.causal = Causal::kBottomRight;
        ExpectAttention(c, contexts.list());
      }
    }
  }
}

// A bias that all batch elements share, whose gradient is summed; one that is
// added to what there is.
TEST(AttentionBias, SummedGradients) {
  const Contexts contexts({1, 3, 16});
  for (const DType bias : {DType::kBF16, DType::kF32}) {
    for (const bool shared : {false, true}) {
      AttentionCase c = BaseCase(DType::kBF16, bias, 64);
      c.batch = shared ? 2 : 1;
      c.bias_broadcast[0] = shared;
      c.accumulate_dbias = !shared;
      ExpectAttention(c, contexts.list());
    }
  }
}

// Heads or batch elements that share a bias of more queries than a block has:
// each element of dbias adds all of them before it is stored.
TEST(AttentionBias, SummedGradientsOfSeveralBlocks) {
  const Contexts contexts({1, 16});
  for (const bool heads : {false, true}) {
    AttentionCase c = BaseCase(DType::kBF16, DType::kF32, 64);
    c.batch = heads ? 1 : 2;
    c.bias_broadcast = {!heads, heads, false, false};
    c.nq = 530;
    c.nk = 150;
    ExpectAttention(c, contexts.list());
  }
}

// Many sequences of one block share a bias: its gradient is summed by groups of
// one sequence and of two, some of which or all see nothing.
TEST(AttentionBias, SummedGradientsOfManySequences) {
  const Contexts contexts({1, 3, 16});
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    AttentionCase c;
    c.dtype = dtype;
    c.batch = 41;
    c.heads = c.kv_heads = 3;
    c.nq = 20;
    c.nk = 33;
    c.head_dim = 24;
    c.value_dim = 16;
    c.bias = DType::kF32;
    c.want_dbias = true;
    for (const bool shares_heads : {false, true}) {
      c.bias_broadcast = {true, shares_heads, false, false};
      for (const double masked : {0.0, 0.5, 1.0}) {
        c.bias_masked = masked;
        c.accumulate_dbias = masked == 0.5;
        ExpectAttention(c, contexts.list());
      }
    }
    c.heads = 6;  // that share keys: not by groups
    ExpectAttention(c, contexts.list());
  }
}

// Rows of dbias that are whole cache lines may be written by non-temporal
// stores.
TEST(AttentionBias, GradientsOfWholeLines) {
  const Contexts contexts({2});
  for (const DType bias : {DType::kBF16, DType::kF32}) {
    AttentionCase c = BaseCase(DType::kBF16, bias, 64);
    c.nk = 352;
    const AttentionInputs inputs = MakeInputs(c);
    const AttentionOutputs outputs = MakeOutputs(c, inputs);
    AttentionBackwardArgs args = BackwardArgs(c, inputs, outputs);
    ASSERT_TRUE(AttentionBackward(args, contexts.list()[0]).ok());
    std::vector<char> memory(
        static_cast<size_t>(c.heads * c.nq * c.nk) * SizeOf(bias) + 64);
    args.dbias.data =
        memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    args.dbias.strides = {c.heads * c.nq * c.nk, c.nq * c.nk, c.nk, 1};
    ASSERT_TRUE(AttentionBackward(args, contexts.list()[0]).ok());
    EXPECT_TRUE(SameBits(args.dbias, outputs.dbias.view)) << Describe(c);
  }
}

// One element of a sub-block here and there that hides its key, whatever the
// key holds, or is so large that scores must not be rounded with it.
TEST(AttentionBias, SomeElementsAreNotOrdinary) {
  const Contexts contexts({1, 2});
  for (const DType bias : kBiases) {
    const double lowest = bias == DType::kF32    ? -3.4028234663852886e38
                          : bias == DType::kBF16 ? -3.3895313892515355e38
                                                 : -65504.0;
    for (const double value :
         {-kInfinity, std::nan(""), lowest, -1e4, 60000.0}) {
      for (const int64_t dim : {64, 128}) {
        const AttentionCase c = BaseCase(DType::kBF16, bias, dim);
        ExpectAttention(
            c,
            MakeInputs(c,
                       [&](AttentionInputs* in) {
                         // In each quarter of 32 x 32 elements once.
                         for (const auto& [i, j] :
                              std::vector<std::pair<int64_t, int64_t>>{
                                  {3, 7}, {35, 50}, {20, 77}, {57, 127}}) {
                           Set(in->bias.view, {0, 1, i, j}, value);
                         }
                       }),
            contexts.list());
      }
    }
  }
}

// Rows whose keys all have the same bias, which says nothing: softmax is that
// of the scores or, where these are lost in it, the same for all keys.
TEST(AttentionBias, RowsOfOneElement) {
  const Contexts contexts({1, 2});
  for (const DType bias : {DType::kF32, DType::kBF16}) {
    for (const double value : {-1e4, -3.3895313892515355e38, -kInfinity}) {
      const AttentionCase c = BaseCase(DType::kBF16, bias, 64);
      ExpectAttention(c,
                      MakeInputs(c,
                                 [&](AttentionInputs* in) {
                                   for (const int64_t i : {0, 17, 45, 64}) {
                                     for (int64_t j = 0; j < c.nk; ++j) {
                                       Set(in->bias.view, {0, 0, i, j}, value);
                                     }
                                   }
                                 }),
                      contexts.list());
    }
  }
}

// What hidden keys hold reaches nobody, in sub-blocks of ordinary bias too.
TEST(AttentionBias, GarbageUnderInfiniteBiasIsHarmless) {
  const Contexts contexts({1, 2});
  for (const DType bias : {DType::kF32, DType::kBF16}) {
    const AttentionCase c = BaseCase(DType::kBF16, bias, 64);
    const auto hidden = [](int64_t key) { return key % 50 == 21 || key > 290; };
    ExpectAttention(
        c,
        MakeInputs(c,
                   [&](AttentionInputs* in) {
                     ForEachIndex(in->bias.view.sizes, [&](const Sizes& at) {
                       if (hidden(at[3])) Set(in->bias.view, at, -kInfinity);
                     });
                     for (const Tensor* t : {&in->k, &in->v}) {
                       ForEachIndex(t->view.sizes, [&](const Sizes& at) {
                         if (hidden(at[2])) Set(t->view, at, std::nan(""));
                       });
                     }
                   }),
        contexts.list());
  }
}

// Negative, tiny and huge scales: bias is not to be divided by the last two.
TEST(AttentionBias, Scales) {
  const Contexts contexts({1, 2});
  for (const DType bias : {DType::kF32, DType::kBF16}) {
    for (const double scale : {-0.125, 1e-20, 0.0}) {
      AttentionCase c = BaseCase(DType::kBF16, bias, 64);
      c.scale = scale;
      ExpectAttention(c, contexts.list());
    }
  }
}

// A bias that grows along the keys: maxima that a row begins with serve for
// some keys only.
TEST(AttentionBias, GrowsAlongTheKeys) {
  const Contexts contexts({1, 2, 16});
  for (const DType bias : {DType::kF32, DType::kBF16}) {
    // The least P is e^-60: smaller ones may be 0.
    for (const double slope : {0.02, 0.05}) {
      AttentionCase c = BaseCase(DType::kBF16, bias, 128);
      c.nk = CasesOfSixteen() == 16 ? 1200 : 700;
      ExpectAttention(
          c,
          MakeInputs(c,
                     [&](AttentionInputs* in) {
                       ForEachIndex(in->bias.view.sizes, [&](const Sizes& at) {
                         Set(in->bias.view, at,
                             slope * static_cast<double>(at[3]));
                       });
                     }),
          contexts.list());
    }
  }
}

}  // namespace
}  // namespace fa2::test
