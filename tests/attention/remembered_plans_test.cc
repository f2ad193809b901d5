// SPDX-License-Identifier: Apache-2.0

// Calls that differ from one before in one thing, on the context that remembers
// its plan: the results are right, and the bits those of a new context.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"

namespace fa2::test {
namespace {

using Change = std::function<void(AttentionCase*)>;

// Grouped heads; sizes that are multiples of no tile.
AttentionCase Grouped(DType dtype) {
  AttentionCase c;
  c.dtype = dtype;
  c.batch = 3;
  c.heads = 4;
  c.kv_heads = 2;
  c.nq = 70;
  c.nk = 90;
  c.head_dim = 32;
  c.value_dim = 32;
  return c;
}

// Heads that a thread takes alone, keys in turn.
AttentionCase Short(DType dtype) {
  AttentionCase c = Grouped(dtype);
  c.batch = 6;
  c.kv_heads = 4;
  c.nq = 40;
  c.nk = 37;
  return c;
}

void SetLengths(AttentionCase* c, std::vector<int64_t> q,
                std::vector<int64_t> k) {
  c->batch = 1;
  c->lengths_q = std::move(q);
  c->lengths_k = std::move(k);
}

// What plans follow from, and what they must not follow from.
std::vector<Change> Changes() {
  return {
      [](AttentionCase* c) { c->batch = 2; },
      [](AttentionCase* c) { c->heads = 2; },
      [](AttentionCase* c) { c->kv_heads = 4; },
      [](AttentionCase* c) { c->nq = 71; },
      [](AttentionCase* c) { c->nq = 2; },
      [](AttentionCase* c) { c->nk = 89; },
      [](AttentionCase* c) { c->nk = 300; },
      [](AttentionCase* c) { c->head_dim = 40; },
      [](AttentionCase* c) { c->value_dim = 24; },
      [](AttentionCase* c) { c->layout = Layout::kBshd; },
      [](AttentionCase* c) { c->keys_broadcast = true; },
      [](AttentionCase* c) { c->causal = Causal::kTopLeft; },
      [](AttentionCase* c) { c->causal = Causal::kBottomRight; },
      [](AttentionCase* c) { c->window_left = 20; },
      [](AttentionCase* c) {
        c->window_left = 20;
        c->window_right = 5;
      },
      [](AttentionCase* c) { c->precision = Precision::kExact; },
      [](AttentionCase* c) { c->alibi = true; },
      [](AttentionCase* c) { c->alibi = c->want_dalibi = true; },
      [](AttentionCase* c) { c->dropout_p = 0.25; },
      [](AttentionCase* c) { c->bias = DType::kF32; },
      [](AttentionCase* c) {
        c->bias = DType::kF32;
        c->want_dbias = true;
      },
      [](AttentionCase* c) {
        c->bias = DType::kF32;
        c->bias_broadcast = {true, false, false, false};
        c->want_dbias = true;
      },
      [](AttentionCase* c) {
        c->bias = DType::kF32;
        c->bias_broadcast = {true, true, false, false};
        c->want_dbias = true;
      },
      // As many rows, cut elsewhere.
      [](AttentionCase* c) {
        SetLengths(c, {30, 40}, {40, 50});
      },
      [](AttentionCase* c) {
        SetLengths(c, {40, 30}, {40, 50});
      },
      [](AttentionCase* c) {
        SetLengths(c, {40, 30}, {50, 40});
      },
      // Of one size, other blocks of them visible.
      [](AttentionCase* c) {
        c->block_size = {16, 16};
        c->blocks_partial = c->blocks_full = 0.3;
      },
      [](AttentionCase* c) {
        c->block_size = {16, 16};
        c->blocks_partial = c->blocks_full = 0.3;
        c->seed = 2;
      },
  };
}

void ExpectEachAfter(const AttentionCase& base,
                     const std::vector<Change>& changes) {
  const Contexts kept({3});
  const auto expect = [&](const AttentionCase& c) {
    const Contexts fresh({3});
    ExpectAttention(c, {kept.list()[0], fresh.list()[0]});
  };
  const size_t step = CasesOfSixteen() == 16 ? 1 : 2;
  for (size_t i = 0; i < changes.size(); i += step) {
    AttentionCase c = base;
    expect(c);
    changes[i](&c);
    expect(c);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(AttentionRememberedPlans, AreThoseOfTheCall) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    ExpectEachAfter(Grouped(dtype), Changes());
  }
}

TEST(AttentionRememberedPlans, AreThoseOfTheCallOfShortHeads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    ExpectEachAfter(Short(dtype),
                    {
                        [](AttentionCase* c) { c->alibi = true; },
                        [](AttentionCase* c) { c->layout = Layout::kBshd; },
                        [](AttentionCase* c) { c->keys_broadcast = true; },
                        [](AttentionCase* c) { c->nk = 200; },
                        [](AttentionCase* c) { c->kv_heads = 2; },
                        [](AttentionCase* c) {
                          c->bias = DType::kF32;
                          c->bias_broadcast = {true, false, false, false};
                          c->want_dbias = true;
                        },
                    });
  }
}

// More shapes than are remembered, by turns, and one of them twice.
TEST(AttentionRememberedPlans, ManyShapesByTurns) {
  const Contexts kept({2});
  for (int64_t i = 0; i < 18; ++i) {
    AttentionCase c = Grouped(DType::kF32);
    c.nq = 20 + 9 * (i % 6);
    c.nk = 110 - 9 * (i % 6);
    const Contexts fresh({2});
    ExpectAttention(c, {kept.list()[0], fresh.list()[0]});
    if (i % 4 == 0) ExpectAttention(c, {kept.list()[0], fresh.list()[0]});
  }
}

}  // namespace
}  // namespace fa2::test
