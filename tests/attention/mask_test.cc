// SPDX-License-Identifier: Apache-2.0

// Masks, boolean ones and others that hold 0 and -inf alone: their patterns,
// layouts, what options meet them, hidden elements that hold garbage, and the
// same bits on any number of threads. Head dims whose kernels are unrolled, and
// another.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fa2/attention.h"
#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"

namespace fa2::test {
namespace {

AttentionCase BaseCase(DType dtype, int64_t dim) {
  AttentionCase c = GroupedCase(dtype, dim);
  c.bias = DType::kBool;
  c.bias_masked = 0.3;
  return c;
}

using Shows = std::function<bool(int64_t query, int64_t key)>;

AttentionInputs WithMask(const AttentionCase& c, const Shows& shows) {
  return MakeInputs(c, [&](AttentionInputs* in) {
    ForEachIndex(in->bias.view.sizes, [&](const Sizes& at) {
      Set(in->bias.view, at, shows(at[2], at[3]));
    });
  });
}

// Tiles are 32 queries x 16 keys, and two of these a unit of products: edges
// at, before and behind the multiples of both.
TEST(AttentionMask, Patterns) {
  const Contexts contexts({1, 2, 16});
  const std::vector<std::pair<std::string, Shows>> patterns = {
      {"padding", [](int64_t, int64_t k) { return k < 270; }},
      {"padding of whole tiles", [](int64_t, int64_t k) { return k < 272; }},
      {"documents",
       [](int64_t q, int64_t k) { return (q + 9) / 45 == (k + 9) / 45; }},
      {"triangle", [](int64_t q, int64_t k) { return k <= q; }},
      {"stripes", [](int64_t, int64_t k) { return k / 16 % 2 == 0; }},
      {"whole tiles by turns",
       [](int64_t q, int64_t k) { return (q / 32 + k / 16) % 2 == 0; }},
      {"whole tiles, one row of them apart",
       [](int64_t q, int64_t k) { return (q / 32 == 1) == (k < 144); }},
      {"one key hidden",
       [](int64_t q, int64_t k) { return q % 37 != 5 || k != 119; }},
      {"one key seen", [](int64_t q, int64_t k) { return k == q; }},
      {"rows that see nothing", [](int64_t q, int64_t) { return q % 3 != 1; }},
      {"everything", [](int64_t, int64_t) { return true; }},
      {"nothing", [](int64_t, int64_t) { return false; }}};
  for (const auto& [name, shows] : patterns) {
    SCOPED_TRACE(name);
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const AttentionCase c = BaseCase(dtype, 64);
      ExpectAttention(c, WithMask(c, shows), contexts.list());
    }
  }
}

TEST(AttentionMask, HeadDims) {
  const Contexts contexts({1, 2});
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const int64_t dim : {48, 64, 128, 256}) {
      if (dim > 64 && CasesOfSixteen() < 16 && dtype != DType::kBF16) continue;
      ExpectAttention(BaseCase(dtype, dim), contexts.list());
    }
  }
}

// What else hides or changes scores.
TEST(AttentionMask, WithOptions) {
  const Contexts contexts({1, 2, 16});
  for (const double masked : {0.3, 1e-3}) {
    for (const std::string option :
         {"causal", "window", "softcap", "alibi", "dropout", "sinks", "all"}) {
      AttentionCase c = BaseCase(DType::kBF16, 64);
      const auto has = [&](const char* name) {
        return option == name || option == "all";
      };
      c.bias_masked = masked;
      if (has("causal")) c.causal = Causal::kBottomRight;
      if (has("window")) c.window_left = 70;
      if (has("softcap")) c.softcap = 20.0;
      c.alibi = c.want_dalibi = has("alibi");
      if (has("dropout")) c.dropout_p = 0.2;
      c.sinks = c.want_dsinks = has("sinks");
      ExpectAttention(c, contexts.list());
    }
  }
}

TEST(AttentionMask, BroadcastDimensions) {
  const Contexts contexts({1, 2});
  for (int dimensions = 1; dimensions < 16; ++dimensions) {
    AttentionCase c = BaseCase(DType::kBF16, 64);
    c.batch = 2;
    for (int i = 0; i < 4; ++i) c.bias_broadcast[i] = (dimensions >> i) & 1;
    ExpectAttention(c, contexts.list());
  }
}

// Dimensions that a stride of 0 repeats, as torch.Tensor.expand makes them: of
// a mask, and of a bias whose gradient has an element for each of them.
TEST(AttentionMask, ExpandedDimensions) {
  const Contexts contexts({1, 2, 16});
  for (const DType dtype : {DType::kBool, DType::kF32}) {
    for (int dimensions = 1; dimensions < 16; ++dimensions) {
      AttentionCase c = BaseCase(DType::kBF16, 64);
      c.batch = 2;
      c.bias = dtype;
      const auto expand = [&](AttentionInputs* in) {
        for (size_t i = 0; i < 4; ++i) {
          if ((dimensions >> i) & 1) in->bias.view.strides[i] = 0;
        }
        in->options.bias = in->bias.view;
      };
      const AttentionInputs inputs = MakeInputs(c, expand);
      ExpectAttention(c, inputs, contexts.list());
      c.want_dbias = dtype == DType::kF32;
      if (c.want_dbias) ExpectAttention(c, inputs, contexts.list());
    }
  }
}

// Queries side by side instead of keys; keys from last to first.
TEST(AttentionMask, Strides) {
  const Contexts contexts({1, 2});
  for (const bool reversed : {false, true}) {
    const AttentionCase c = BaseCase(DType::kBF16, 64);
    const auto change = [&](AttentionInputs* in) {
      Tensor& mask = in->bias;
      if (reversed) {
        mask.view.data = static_cast<char*>(mask.view.data) + c.nk - 1;
        mask.view.strides[3] = -1;
      } else {
        mask = MakeTensor(DType::kBool, {1, c.heads, c.nk, c.nq});
        std::swap(mask.view.sizes[2], mask.view.sizes[3]);
        std::swap(mask.view.strides[2], mask.view.strides[3]);
        ForEachIndex(mask.view.sizes, [&](const Sizes& at) {
          Set(mask.view, at, (at[2] * 7 + at[3] * 3 + at[1]) % 5 != 0);
        });
      }
      in->options.bias = mask.view;
    };
    ExpectAttention(c, MakeInputs(c, change), contexts.list());
  }
}

// What hidden keys hold reaches nobody, in tiles that show others too.
TEST(AttentionMask, GarbageUnderMaskIsHarmless) {
  const Contexts contexts({1, 2});
  const auto hidden = [](int64_t key) { return key % 50 == 21 || key > 290; };
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const AttentionCase c = BaseCase(dtype, 64);
    const auto change = [&](AttentionInputs* in) {
      ForEachIndex(in->bias.view.sizes, [&](const Sizes& at) {
        if (hidden(at[3])) Set(in->bias.view, at, false);
      });
      for (const Tensor* t : {&in->k, &in->v}) {
        ForEachIndex(t->view.sizes, [&](const Sizes& at) {
          if (hidden(at[2])) Set(t->view, at, std::nan(""));
        });
      }
    };
    ExpectAttention(c, MakeInputs(c, change), contexts.list());
  }
}

// 0 and -inf of any float dtype are the same mask, to the bit, and one element
// that is something else is added.
TEST(AttentionMask, ZerosAndInfinities) {
  const Contexts contexts({1, 2, 16});
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    AttentionCase c = BaseCase(dtype, 64);
    c.bias_broadcast[1] = true;
    const Shows shows = [](int64_t q, int64_t k) {
      return k < 250 && (q + k) % 23 != 5;
    };
    const AttentionInputs expected_inputs = WithMask(c, shows);
    for (const DType mask :
         {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
      c.bias = mask;
      const double hides = -std::numeric_limits<double>::infinity();
      const auto change = [&](double more) {
        return [&, more](AttentionInputs* in) {
          ForEachIndex(in->bias.view.sizes, [&](const Sizes& at) {
            const double zero = at[3] % 2 == 0 ? 0.0 : -0.0;
            Set(in->bias.view, at, shows(at[2], at[3]) ? zero : hides);
          });
          if (more != 0.0) {
            Set(in->bias.view, {0, 0, c.nq - 1, 249}, more);
          }
        };
      };
      const AttentionInputs inputs = MakeInputs(c, change(0.0));
      ExpectAttention(c, inputs, contexts.list());
      ExpectAttention(c, MakeInputs(c, change(1.5)), contexts.list());
      AttentionCase with_gradient = c;
      with_gradient.want_dbias = true;
      ExpectAttention(with_gradient, inputs, contexts.list());

      AttentionCase boolean = c;
      boolean.bias = DType::kBool;
      Context* const context = contexts.list()[0];
      const AttentionOutputs got = MakeOutputs(c, inputs);
      const AttentionOutputs expected = MakeOutputs(boolean, expected_inputs);
      ASSERT_TRUE(AttentionForward(ForwardArgs(inputs, got), context).ok());
      ASSERT_TRUE(
          AttentionForward(ForwardArgs(expected_inputs, expected), context)
              .ok());
      EXPECT_TRUE(SameBits(got.out.view, expected.out.view)) << Describe(c);
      ASSERT_TRUE(
          AttentionBackward(BackwardArgs(c, inputs, got), context).ok());
      ASSERT_TRUE(AttentionBackward(
                      BackwardArgs(boolean, expected_inputs, expected), context)
                      .ok());
      EXPECT_TRUE(SameBits(got.dq.view, expected.dq.view)) << Describe(c);
      EXPECT_TRUE(SameBits(got.dk.view, expected.dk.view)) << Describe(c);
      EXPECT_TRUE(SameBits(got.dv.view, expected.dv.view)) << Describe(c);
    }
  }
}

// Long enough for the forward to go on with the maxima that it has, where
// nothing is hidden.
TEST(AttentionMask, ManyKeysOnAnyNumberOfThreads) {
  const Contexts contexts({1, 2, 5, 16});
  for (const int64_t dim : {64, 128}) {
    for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
      AttentionCase c = BaseCase(DType::kBF16, dim);
      c.nq = CasesOfSixteen() == 16 ? 230 : 100;
      c.nk = CasesOfSixteen() == 16 ? 1330 : 560;
      c.causal = causal;
      ExpectAttention(c,
                      WithMask(c,
                               [](int64_t q, int64_t k) {
                                 return k / 300 != 1 || (q + k) % 11 != 0;
                               }),
                      contexts.list());
    }
  }
}

}  // namespace
}  // namespace fa2::test
