// SPDX-License-Identifier: Apache-2.0

// ALiBi with slopes so steep that queries reach a part of the keys only: what
// is left out must not show, whatever scores and masks are, nor where far rows
// hold something that no probability takes away.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"

namespace fa2::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNaN = std::nan("");

// A steep slope and a gentle one, sharing their keys.
constexpr double kSlopes[] = {1.5, 0.02};

// Random scores are within some 10, so that the steep head reaches 60 keys.
AttentionCase BaseCase(DType dtype, int64_t dim = 64) {
  AttentionCase c;
  c.dtype = dtype;
  c.heads = 2;
  c.kv_heads = 1;
  c.nq = c.nk = CasesOfSixteen() == 16 ? 430 : 250;
  c.head_dim = c.value_dim = dim;
  c.alibi = c.want_dalibi = true;
  return c;
}

void ExpectWithSlopes(
    const AttentionCase& c, const Contexts& contexts,
    const std::function<void(AttentionInputs*)>& change = [](AttentionInputs*) {
    }) {
  const AttentionInputs inputs = MakeInputs(c, [&](AttentionInputs* in) {
    ForEachIndex(in->alibi_slopes.view.sizes, [&](const Sizes& at) {
      // Of a batch with slopes of its own the other way round.
      Set(in->alibi_slopes.view, at, kSlopes[(at[0] + at[1]) % 2]);
    });
    change(in);
  });
  ExpectAttention(c, inputs, contexts.list());
}

TEST(AttentionAlibi, SteepSlopes) {
  const Contexts contexts({1, 2, 16});
  for (const DType dtype :
       {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
    for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
      for (const int64_t dim : {64, 128, 40}) {
        if (dim != 64 && CasesOfSixteen() < 16) continue;
        AttentionCase c = BaseCase(dtype, dim);
        c.causal = causal;
        ExpectWithSlopes(c, contexts);
      }
    }
  }
}

// Queries far behind the first keys: scores grow along more of them than one
// running maximum serves for, slowly, fast and by more than a float holds.
TEST(AttentionAlibi, ScoresGrowTowardsTheQueries) {
  const Contexts contexts({1, 2, 16});
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const double slope : {0.01, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0}) {
      if (dtype != DType::kBF16 && CasesOfSixteen() < 16) continue;
      AttentionCase c = BaseCase(dtype, dtype == DType::kBF16 ? 128 : 64);
      c.heads = 1;
      c.nq = 90;
      c.nk = CasesOfSixteen() == 16 ? 1250 : 700;
      c.want_dq = c.want_dk = c.want_dv = c.want_dalibi = false;
      ExpectWithSlopes(c, contexts, [&](AttentionInputs* in) {
        Set(in->alibi_slopes.view, {0, 0, 0, 0}, slope);
      });
    }
  }
}

TEST(AttentionAlibi, SteepSlopesWithOptions) {
  const Contexts contexts({1, 2});
  const std::vector<std::function<void(AttentionCase*)>> options = {
      [](AttentionCase* c) { c->precision = Precision::kExact; },
      [](AttentionCase* c) { c->softcap = 5.0; },
      [](AttentionCase* c) { c->sinks = c->want_dsinks = true; },
      [](AttentionCase* c) { c->dropout_p = 0.2; },
      [](AttentionCase* c) { c->dlse = true; },
      [](AttentionCase* c) { c->delta = true; },
      [](AttentionCase* c) { c->scale = -0.2; },
      // The nearest visible key is some way off.
      [](AttentionCase* c) {
        c->causal = Causal::kTopLeft;
        c->nq = c->nk - 40;
      },
      [](AttentionCase* c) {
        c->window_left = 60;
        c->window_right = 200;
      },
      // Queries that see nothing.
      [](AttentionCase* c) {
        c->causal = Causal::kBottomRight;
        c->nq = c->nk + 50;
      },
      [](AttentionCase* c) {
        c->batch = 2;
        c->alibi_per_batch = true;
        c->layout = c->grad_layout = Layout::kBshd;
      },
      [](AttentionCase* c) {
        c->lengths_q = {7, 190, 0, 33, 140};
        c->lengths_k = {9, 200, 5, 31, 150};
      },
      // Beside a mask nothing is left out.
      [](AttentionCase* c) {
        c->bias = DType::kBool;
        c->bias_masked = 0.3;
      },
  };
  for (size_t i = 0; i < options.size(); ++i) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      if (dtype == DType::kF32 && CasesOfSixteen() < 16 && i % 2 == 1) continue;
      SCOPED_TRACE(std::to_string(i));
      AttentionCase c = BaseCase(dtype);
      options[i](&c);
      ExpectWithSlopes(c, contexts);
    }
  }
}

// Scores that outweigh the distance: a key at one end that most queries turn
// to, though others are nearer.
TEST(AttentionAlibi, FarKeysThatMatter) {
  const Contexts contexts({1, 2});
  for (const DType dtype : {DType::kBF16, DType::kF64}) {
    for (const int64_t far : {5, 240}) {
      AttentionCase c = BaseCase(dtype);
      // Of other keys P is on either side of what is kept, one by one.
      c.want_dk = c.want_dv = c.want_dalibi = false;
      ExpectWithSlopes(c, contexts, [&](AttentionInputs* in) {
        Set(in->alibi_slopes.view, {0, 0, 0, 0}, 0.4);
        for (int64_t h = 0; h < c.heads; ++h) {
          for (int64_t q = 0; q < c.nq; ++q) {
            Set(in->q.view, {0, h, q, 0}, 8.0);
          }
        }
        for (int64_t k = 0; k < c.nk; ++k) {
          // Scores are an eighth of the product.
          Set(in->k.view, {0, 0, k, 0}, k == far ? 80.0 : -3.0);
        }
      });
    }
  }
}

// What far rows hold reaches whatever sees them, however little they count. (An
// infinity in Q or K is a matter of arithmetic.)
TEST(AttentionAlibi, NonFiniteRowsOutOfReach) {
  const Contexts contexts({1, 2});
  struct Poison {
    Tensor AttentionInputs::*tensor;
    double value;
  };
  const std::vector<Poison> poisons = {
      {&AttentionInputs::q, kNaN},    {&AttentionInputs::k, kNaN},
      {&AttentionInputs::v, kNaN},    {&AttentionInputs::v, kInfinity},
      {&AttentionInputs::dout, kNaN}, {&AttentionInputs::dout, -kInfinity}};
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (size_t i = 0; i < poisons.size(); ++i) {
      if (CasesOfSixteen() < 16 && dtype == DType::kF32) continue;
      SCOPED_TRACE(std::to_string(i));
      AttentionCase c = BaseCase(dtype);
      c.nq = c.nk = 250;
      c.want_dalibi = false;
      ExpectWithSlopes(c, contexts, [&](AttentionInputs* in) {
        Set((in->*poisons[i].tensor).view, {0, 0, 3, 6}, poisons[i].value);
      });
    }
  }
}

}  // namespace
}  // namespace fa2::test
