// SPDX-License-Identifier: Apache-2.0

// NaN and infinity in an input reach the outputs that depend on it and no
// others; rows that see no key; large scores.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"

namespace fa2::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

AttentionCase BaseCase(DType dtype) {
  AttentionCase c;
  c.dtype = dtype;
  c.heads = 4;
  c.kv_heads = 2;
  c.nq = 101;
  c.nk = 83;
  c.head_dim = 40;
  c.value_dim = 33;
  return c;
}

// Which tensor, where.
struct Poison {
  std::string name;
  std::function<void(AttentionInputs*, double value)> put;
};

const std::vector<Poison>& Poisons() {
  static const auto* const poisons = new std::vector<Poison>{
      {"q",
       [](AttentionInputs* in, double x) {
         Set(in->q.view, {0, 2, 37, 5}, x);
       }},
      {"k in an early tile",
       [](AttentionInputs* in, double x) {
         Set(in->k.view, {0, 1, 3, 39}, x);
       }},
      {"k in the last tile",
       [](AttentionInputs* in, double x) {
         Set(in->k.view, {0, 0, 82, 0}, x);
       }},
      {"v",
       [](AttentionInputs* in, double x) {
         Set(in->v.view, {0, 1, 70, 32}, x);
       }},
      {"dout",
       [](AttentionInputs* in, double x) {
         Set(in->dout.view, {0, 3, 100, 7}, x);
       }},
  };
  return *poisons;
}

TEST(AttentionNonfinite, NanReachesWhatDependsOnIt) {
  const Contexts contexts({1, 3});
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const Causal causal :
         {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
      for (const Poison& poison : Poisons()) {
        SCOPED_TRACE("NaN in " + poison.name);
        AttentionCase c = BaseCase(dtype);
        c.causal = causal;
        ExpectAttention(
            c,
            MakeInputs(c, [&](AttentionInputs* in) { poison.put(in, kNan); }),
            contexts.list());
      }
    }
  }
}

// NaN and infinity in each tensor of calls whose keys are not packed, near the
// end of the keys, without a window and with one that hides them from some.
void ExpectOfUnpackedKeys(const AttentionCase& base) {
  const Contexts contexts({1, 3});
  const int64_t key = base.nk - 20;
  const Poison poisons[] = {
      {"q",
       [](AttentionInputs* in, double x) {
         Set(in->q.view, {0, 2, 1, 5}, x);
       }},
      {"k",
       [&](AttentionInputs* in, double x) {
         Set(in->k.view, {0, 1, key, base.head_dim - 1}, x);
       }},
      {"v",
       [&](AttentionInputs* in, double x) {
         Set(in->v.view, {0, 1, key, base.value_dim - 1}, x);
       }},
      {"dout",
       [](AttentionInputs* in, double x) {
         Set(in->dout.view, {0, 3, 1, 7}, x);
       }},
  };
  for (const int64_t window_left : {-1, 30}) {
    for (const Poison& poison : poisons) {
      SCOPED_TRACE(poison.name);
      AttentionCase c = base;
      c.window_left = window_left;
      const auto expect = [&](double value) {
        ExpectAttention(
            c,
            MakeInputs(c, [&](AttentionInputs* in) { poison.put(in, value); }),
            contexts.list());
      };
      expect(kNan);
      // An infinite score: see below.
      if (poison.name != "q" && poison.name != "k") expect(kInfinity);
    }
  }
}

// Of one part of the keys, of several, and of one of several runs.
TEST(AttentionNonfinite, OfFewQueries) {
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const int64_t nk : {83, 700}) {
      AttentionCase c = BaseCase(dtype);
      c.nq = 2;
      c.nk = nk;
      ExpectOfUnpackedKeys(c);
    }
  }
  AttentionCase c = BaseCase(DType::kF32);
  c.heads = c.kv_heads = 64;
  c.nq = 2;
  c.nk = 1091;
  c.head_dim = 17;
  c.value_dim = 18;
  ExpectOfUnpackedKeys(c);
}

// Of one block of keys and of several, of one head of queries and of two.
TEST(AttentionNonfinite, OfKeysAsTheyLie) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const int64_t nk : {50, 300}) {
      AttentionCase c = BaseCase(dtype);
      c.kv_heads = c.heads;
      c.nq = 40;
      c.nk = nk;
      ExpectOfUnpackedKeys(c);
      c.kv_heads = c.heads / 2;
      c.nq = 20;
      ExpectOfUnpackedKeys(c);
    }
  }
}

// K alone: whole panels of bf16.
TEST(AttentionNonfinite, OfKAsItLies) {
  for (const int64_t nk : {64, 320}) {
    AttentionCase c = BaseCase(DType::kBF16);
    c.nq = 40;
    c.nk = nk;
    c.head_dim = 64;
    ExpectOfUnpackedKeys(c);
  }
}

TEST(AttentionNonfinite, InfinityReachesWhatDependsOnIt) {
  const Contexts contexts({2});
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const double value : {kInfinity, -kInfinity}) {
      for (const Poison& poison : Poisons()) {
        // An infinite score makes P 0 or NaN by its sign, and 0 * inf in the
        // products behind it: what depends on it is a matter of arithmetic.
        if (poison.name != "v" && poison.name != "dout") continue;
        SCOPED_TRACE("infinity in " + poison.name);
        AttentionCase c = BaseCase(dtype);
        c.causal = Causal::kTopLeft;
        ExpectAttention(
            c,
            MakeInputs(c, [&](AttentionInputs* in) { poison.put(in, value); }),
            contexts.list());
      }
    }
  }
}

// Keys that are masked may hold anything: results are those of clean keys, bit
// for bit.
TEST(AttentionNonfinite, GarbageInMaskedKeysIsHarmless) {
  const Contexts contexts({2});
  Context* const context = contexts.list().front();
  struct Masking {
    std::string name;
    std::function<void(AttentionCase*)> set;
    std::function<bool(int64_t key)> hidden;  // from all queries
  };
  const std::vector<Masking> maskings = {
      {"top-left, more keys than queries",
       [](AttentionCase* c) {
         c->causal = Causal::kTopLeft;
         c->nq = 50;
       },
       [](int64_t key) { return key >= 50; }},
      {"window around the diagonal",
       [](AttentionCase* c) {
         c->nq = 20;
         c->window_left = 10;
         c->window_right = 0;
       },
       [](int64_t key) { return key < 83 - 20 - 10; }},
  };
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Masking& masking : maskings) {
      for (const double garbage : {kNan, kInfinity, -kInfinity}) {
        SCOPED_TRACE(masking.name);
        AttentionCase c = BaseCase(dtype);
        masking.set(&c);
        const AttentionInputs clean = MakeInputs(c);
        const AttentionInputs dirty = MakeInputs(c, [&](AttentionInputs* in) {
          for (const Tensor* t : {&in->k, &in->v}) {
            ForEachIndex(t->view.sizes, [&](const Sizes& at) {
              if (masking.hidden(at[2])) Set(t->view, at, garbage);
            });
          }
        });
        const AttentionOutputs a = MakeOutputs(c, clean);
        const AttentionOutputs b = MakeOutputs(c, dirty);
        ASSERT_TRUE(AttentionForward(ForwardArgs(clean, a), context).ok());
        ASSERT_TRUE(AttentionForward(ForwardArgs(dirty, b), context).ok());
        ASSERT_TRUE(AttentionBackward(BackwardArgs(c, clean, a), context).ok());
        ASSERT_TRUE(AttentionBackward(BackwardArgs(c, dirty, b), context).ok());
        EXPECT_TRUE(SameBits(a.out.view, b.out.view)) << Describe(c);
        EXPECT_TRUE(SameBits(a.lse.view, b.lse.view)) << Describe(c);
        EXPECT_TRUE(SameBits(a.dq.view, b.dq.view)) << Describe(c);
        EXPECT_TRUE(SameBits(a.dk.view, b.dk.view)) << Describe(c);
        EXPECT_TRUE(SameBits(a.dv.view, b.dv.view)) << Describe(c);
      }
    }
  }
}

TEST(AttentionNonfinite, GarbageUnderABooleanMaskIsHarmless) {
  const Contexts contexts({1, 2});
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    AttentionCase c = BaseCase(dtype);
    c.bias = DType::kBool;
    c.bias_broadcast = {true, true, true, false};
    const auto hidden = [](int64_t key) { return key % 7 == 3 || key >= 60; };
    const AttentionInputs inputs = MakeInputs(c, [&](AttentionInputs* in) {
      ForEachIndex(in->bias.view.sizes, [&](const Sizes& at) {
        Set(in->bias.view, at, !hidden(at[3]));
      });
      for (const Tensor* t : {&in->k, &in->v}) {
        ForEachIndex(t->view.sizes, [&](const Sizes& at) {
          if (hidden(at[2])) Set(t->view, at, kNan);
        });
      }
    });
    // The oracle never reads masked keys, so nothing here is NaN.
    EXPECT_TRUE(std::isfinite(Get(inputs.out.view, {0, 0, 0, 0})));
    ExpectAttention(c, inputs, contexts.list());
  }
}

TEST(AttentionNonfinite, NanInTheBiasReachesItsRow) {
  const Contexts contexts({1, 2});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    AttentionCase c = BaseCase(dtype);
    c.bias = DType::kF32;
    c.want_dbias = true;
    ExpectAttention(c,
                    MakeInputs(c,
                               [&](AttentionInputs* in) {
                                 Set(in->bias.view, {0, 1, 40, 20}, kNan);
                               }),
                    contexts.list());
  }
}

// Masks are often written as the lowest finite number instead of -inf.
TEST(AttentionNonfinite, LowestBiasHides) {
  const Contexts contexts({1, 2});
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType bias : {DType::kF32, DType::kBF16}) {
      const double lowest =
          bias == DType::kF32 ? -3.4028234663852886e38 : -3.3895313892515355e38;
      for (const bool want_dbias : {false, true}) {
        AttentionCase c = BaseCase(dtype);
        c.bias = bias;
        c.want_dbias = want_dbias;
        const AttentionInputs inputs = MakeInputs(c, [&](AttentionInputs* in) {
          ForEachIndex(in->bias.view.sizes, [&](const Sizes& at) {
            if ((at[2] + at[3]) % 3 != 0) Set(in->bias.view, at, lowest);
          });
        });
        EXPECT_EQ(Get(inputs.bias.view, {0, 0, 0, 1}), lowest);
        ExpectAttention(c, inputs, contexts.list());
      }
    }
  }
}

// Rows that see no key: O is 0, lse -inf, and no gradient comes from them,
// whichever of -inf, +inf and 0 the caller's lse holds.
TEST(AttentionNonfinite, RowsThatSeeNoKey) {
  const Contexts contexts({1, 2});
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    AttentionCase c = BaseCase(dtype);
    c.causal = Causal::kBottomRight;
    c.nq = 150;  // rows 0 to 66 see nothing
    for (const double lse : {-kInfinity, kInfinity, 0.0}) {
      const AttentionInputs inputs = MakeInputs(c);
      EXPECT_EQ(Get(inputs.lse.view, {0, 0, 66, 0}), -kInfinity);
      EXPECT_TRUE(std::isfinite(Get(inputs.lse.view, {0, 0, 67, 0})));
      ForEachIndex(inputs.lse.view.sizes, [&](const Sizes& at) {
        if (at[2] <= 66) Set(inputs.lse.view, at, lse);
      });
      ExpectAttention(c, inputs, contexts.list());
    }
  }
}

TEST(AttentionNonfinite, NoRowSeesAnyKey) {
  const Contexts contexts({1, 2});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    AttentionCase c = BaseCase(dtype);
    c.window_left = 0;
    c.window_right = 0;
    c.nk = 0;
    ExpectAttention(c, contexts.list());
    c.nk = 83;
    c.bias = DType::kBool;
    c.bias_masked = 1.0;
    ExpectAttention(c, contexts.list());
  }
}

// Scores of +-1e4 neither overflow nor lose the row.
TEST(AttentionNonfinite, LargeScores) {
  const Contexts contexts({1, 2});
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Causal causal : {Causal::kNone, Causal::kTopLeft}) {
      AttentionCase c = BaseCase(dtype);
      c.causal = causal;
      c.q_sigma = 4000.0;
      const AttentionInputs inputs = MakeInputs(c);
      double largest = 0.0;
      ForEachIndex(inputs.lse.view.sizes, [&](const Sizes& at) {
        largest = std::max(largest, Get(inputs.lse.view, at));
      });
      EXPECT_GT(largest, 1e4);
      ExpectAttention(c, inputs, contexts.list());
    }
  }
}

// All scores of a row are near -1e4 (or 1e4): their differences count.
TEST(AttentionNonfinite, ScoresFarFromZero) {
  const Contexts contexts({1, 2});
  for (const double shift : {-1e4, 1e4}) {
    AttentionCase c = BaseCase(DType::kF32);
    c.bias = DType::kF32;
    c.want_dbias = true;
    ExpectAttention(
        c,
        MakeInputs(c, [&](AttentionInputs* in) { Fill(in->bias.view, shift); }),
        contexts.list());
  }
}

// Scores that grow along the keys, evenly, by leaps and to NaN: the maxima that
// a row begins with serve for some keys only.
TEST(AttentionNonfinite, ScoresGrowAlongTheKeys) {
  const Contexts contexts({1, 2});
  const std::vector<std::function<double(int64_t)>> growths = {
      [](int64_t key) { return 0.08 * static_cast<double>(key); },
      [](int64_t key) { return key % 130 == 129 ? 15.0 : 0.0; },
      [](int64_t key) { return key < 300   ? 0.0
                               : key < 500 ? 150.0
                                           : -40.0; },
      [](int64_t key) {
        return key == 450 ? kNan : 0.02 * static_cast<double>(key);
      },
  };
  const std::vector<std::pair<DType, int64_t>> kinds = {{DType::kF32, 64},
                                                        {DType::kBF16, 64},
                                                        {DType::kBF16, 128},
                                                        {DType::kF16, 64}};
  for (const auto& [dtype, head_dim] : kinds) {
    for (size_t i = 0; i < growths.size(); ++i) {
      for (const std::string option :
           {"", "dropout", "alibi", "softcap", "mask"}) {
        SCOPED_TRACE(option);
        AttentionCase c;
        c.dtype = dtype;
        c.nq = 70;
        c.nk = 620;
        c.head_dim = c.value_dim = head_dim;
        c.scale = 0.125;
        c.dropout_p = option == "dropout" ? 0.25 : 0.0;
        c.alibi = option == "alibi";
        c.softcap = option == "softcap" ? 30.0 : 0.0;
        if (option == "mask") {
          c.bias = DType::kBool;
          c.bias_masked = 0.1;
        }
        c.want_dq = c.want_dk = c.want_dv = false;
        c.causal = i % 2 == 0 ? Causal::kNone : Causal::kBottomRight;
        // The score is the sum of scale q k.
        ExpectAttention(
            c,
            MakeInputs(c,
                       [&](AttentionInputs* in) {
                         for (int64_t q = 0; q < c.nq; ++q) {
                           Set(in->q.view, {0, 0, q, 0}, 8.0);
                         }
                         for (int64_t k = 0; k < c.nk; ++k) {
                           Set(in->k.view, {0, 0, k, 0}, growths[i](k));
                         }
                       }),
            contexts.list());
      }
    }
  }
}

}  // namespace
}  // namespace fa2::test
