// SPDX-License-Identifier: Apache-2.0

// Dense attention over a grid of sizes: every pair of (Nq, Nk) and head
// dimension, each with dtype, precision, mask, head grouping, layout and kinds
// of gradients drawn so that all of them meet all sizes, on 1 to 4 threads that
// must agree bit for bit.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"
#include "tests/support/random.h"

namespace fa2::test {
namespace {

const std::vector<std::pair<int64_t, int64_t>> kSizes = {
    {1, 1},     {1, 147},   {113, 203},   {128, 217}, {113, 211}, {108, 256},
    {256, 512}, {512, 256}, {1023, 1024}, {1, 239},   {239, 1},   {3, 799},
    {799, 3},   {127, 512}, {64, 1},      {0, 5},     {5, 0}};
const std::vector<int64_t> kDims = {1,  8,   31,  32,  40,  59,  64,  80,
                                    96, 111, 128, 160, 192, 256, 264, 512};

struct Numbers {
  DType dtype;
  Precision precision;
};
const std::vector<Numbers> kNumbers = {
    {DType::kBF16, Precision::kFast},  {DType::kF32, Precision::kFast},
    {DType::kBF16, Precision::kExact}, {DType::kF16, Precision::kFast},
    {DType::kF32, Precision::kHigh},   {DType::kF32, Precision::kExact},
    {DType::kF16, Precision::kExact},  {DType::kF64, Precision::kFast}};

struct Mask {
  Causal causal;
  int64_t left;
  int64_t right;
};
const std::vector<Mask> kMasks = {
    {Causal::kNone, -1, -1},        {Causal::kTopLeft, -1, -1},
    {Causal::kBottomRight, -1, -1}, {Causal::kTopLeft, 33, -1},
    {Causal::kBottomRight, 16, -1}, {Causal::kNone, 40, 7},
    {Causal::kNone, -1, 20},        {Causal::kTopLeft, 50, 5}};

struct Heads {
  int64_t query;
  int64_t kv;
};
const std::vector<Heads> kHeads = {{1, 1}, {4, 2}, {2, 2}, {3, 1}, {6, 2}};

constexpr int kPlacements = 8;

// Layouts of inputs and gradients.
void Place(int which, AttentionCase* c) {
  switch (which) {
    case 0:
      break;
    case 1:
      c->layout = c->grad_layout = Layout::kBshd;
      break;
    case 2:
      c->packing = c->nq == c->nk && c->head_dim == c->value_dim
                       ? Packing::kQkv
                       : Packing::kNone;
      c->layout = Layout::kPaddedRows;
      break;
    case 3:
      c->dout_broadcast = {true, true, true, true};
      c->grad_layout = Layout::kPaddedRows;
      break;
    case 4:
      c->layout = c->grad_layout = Layout::kReversed;
      break;
    case 5:
      c->packing = c->head_dim == c->value_dim ? Packing::kKv : Packing::kNone;
      break;
    case 6:
      c->layout = c->grad_layout = Layout::kStridedLast;
      break;
    default:
      c->dout_broadcast = {false, false, true, false};
      break;
  }
}

// Case `index` of the grid: sizes and dimensions in turn; the other choices
// step through their lists at strides without common factors, so that a
// neighbour in size is never the same in anything else.
AttentionCase GridCase(uint64_t index) {
  const auto take = [](const auto& list, uint64_t i) {
    return list[i % list.size()];
  };
  const uint64_t size = index % kSizes.size();
  const uint64_t dim = index / kSizes.size();
  Random r(index);
  AttentionCase c;
  c.seed = index + 1;
  std::tie(c.nq, c.nk) = kSizes[size];
  c.head_dim = take(kDims, dim);
  c.value_dim = r.Chance(0.25) ? take(kDims, dim + 5) : c.head_dim;
  if (c.value_dim > 2 * c.head_dim) c.value_dim = c.head_dim + 3;
  const Numbers numbers = take(kNumbers, index);
  c.dtype = numbers.dtype;
  c.precision = numbers.precision;
  const Mask mask = take(kMasks, index / 3 + dim);
  c.causal = mask.causal;
  c.window_left = mask.left;
  c.window_right = mask.right;
  const bool large = c.nq * c.nk > 100000;
  const Heads heads =
      large ? kHeads[dim % 8 == 1 ? 1 : 0] : take(kHeads, index);
  c.heads = heads.query;
  c.kv_heads = heads.kv;
  c.batch = large ? 1 : r.Integer(1, 2);
  Place(static_cast<int>((index + dim) % kPlacements), &c);
  if (c.dtype != DType::kF64 && r.Chance(0.5)) c.grad_dtype = DType::kF32;
  c.accumulate_dq = r.Chance(0.15);
  c.accumulate_dk = r.Chance(0.15);
  c.accumulate_dv = r.Chance(0.15);
  c.want_dq = c.accumulate_dq || !r.Chance(0.06);
  c.want_dk = c.accumulate_dk || !r.Chance(0.06);
  c.want_dv = c.accumulate_dv || !r.Chance(0.06);
  if (r.Chance(0.2)) c.scale = r.Uniform(0.05, 0.2);
  c.delta = r.Chance(0.15);
  return c;
}

// The largest pair meets a quarter of the dimensions: the oracle takes seconds
// for each.
bool IsTooLarge(const AttentionCase& c, uint64_t dim) {
  return c.nq * c.nk > 1000000 && dim % 4 != 2;
}

TEST(AttentionGrid, AllSizesAndDimensions) {
  const Contexts contexts({1, 2, 3, 4});
  const auto share = static_cast<uint64_t>(CasesOfSixteen());
  int run = 0;
  for (uint64_t i = 0; i < kSizes.size() * kDims.size(); ++i) {
    // 7 has no factor in common with 16 or the lists' lengths.
    if (i * 7 % 16 >= share) continue;
    const AttentionCase c = GridCase(i);
    if (IsTooLarge(c, i / kSizes.size())) continue;
    if (share < 16 && c.nq * c.nk > 60000) continue;
    ExpectAttention(c, contexts.list());
    ++run;
  }
  EXPECT_GE(run, static_cast<int>(share * 12));
}

// One head and one batch must still give work to all threads, with the same
// bits.
TEST(AttentionGrid, OneHeadOnAnyNumberOfThreads) {
  const Contexts contexts({1, 2, 3, 4, 16});
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
      AttentionCase c;
      c.dtype = dtype;
      c.causal = causal;
      c.nq = CasesOfSixteen() == 16 ? 700 : 257;
      c.nk = 513;
      c.head_dim = c.value_dim = 64;
      ExpectAttention(c, contexts.list());
    }
  }
}

// The forward's blocks of queries may go by the threads, and what it does for
// some queries must not depend on which others share their block: whole strips
// of 128 keys and rests, some of them before the diagonal.
TEST(AttentionGrid, ForwardOnAnyNumberOfThreads) {
  const Contexts contexts({1, 2, 16});
  for (const int64_t dim : {64, 128}) {
    for (const std::string option :
         {"", "alibi", "softcap", "dropout", "bias", "mask"}) {
      for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
        AttentionCase c;
        c.dtype = DType::kBF16;
        c.nq = CasesOfSixteen() == 16 ? 230 : 100;
        c.nk = CasesOfSixteen() == 16 ? 1330 : 560;
        c.head_dim = c.value_dim = dim;
        c.causal = causal;
        c.alibi = option == "alibi";
        c.softcap = option == "softcap" ? 20.0 : 0.0;
        c.dropout_p = option == "dropout" ? 0.2 : 0.0;
        if (option == "bias") c.bias = DType::kF32;
        if (option == "mask") c.bias = DType::kBool;
        c.want_dq = c.want_dk = c.want_dv = false;
        ExpectAttention(c, contexts.list());
      }
    }
  }
}

// An engine chosen for many keys must be as good where a mask leaves few.
TEST(AttentionGrid, FewOfManyKeysVisible) {
  const Contexts contexts({2});
  for (const Numbers& numbers : kNumbers) {
    for (const double masked : {0.0, 0.9, 0.99}) {
      AttentionCase c;
      c.dtype = numbers.dtype;
      c.precision = numbers.precision;
      c.nq = 70;
      c.nk = 300;
      c.head_dim = c.value_dim = 64;
      c.bias = DType::kBool;
      c.bias_masked = masked;
      ExpectAttention(c, contexts.list());
    }
  }
}

// Where heads are enough for all threads a head's keys are one part, which few
// queries take in runs of 1,024 keys, or fewer where rows are many or long.
TEST(AttentionGrid, FewQueriesOfSeveralRuns) {
  const Contexts contexts({1, 3});
  struct Shape {
    int64_t heads, kv_heads, nq, nk, head_dim;
  };
  const std::vector<Shape> shapes = {{64, 64, 1, 1091, 64},
                                     {64, 64, 7, 641, 16},
                                     {128, 64, 9, 321, 32},
                                     {64, 64, 2, 321, 280}};
  int which = 0;
  for (const DType dtype :
       {DType::kBF16, DType::kF32, DType::kF16, DType::kF64}) {
    for (size_t i = 0; i < shapes.size(); ++i, ++which) {
      if (CasesOfSixteen() < 16 && which % 4 != which / 4) continue;
      AttentionCase c;
      c.seed = static_cast<uint64_t>(which);
      c.dtype = dtype;
      c.heads = shapes[i].heads;
      c.kv_heads = shapes[i].kv_heads;
      c.nq = shapes[i].nq;
      c.nk = shapes[i].nk - which % 3;
      c.head_dim = c.value_dim = shapes[i].head_dim;
      switch (which % 5) {
        case 0:
          break;
        case 1:
          c.causal = Causal::kBottomRight;
          c.window_left = 290;
          c.layout = Layout::kReversed;
          break;
        case 2:
          c.bias = DType::kBool;
          c.bias_masked = 0.9;
          c.bias_broadcast = {true, true, true, false};
          c.dropout_p = 0.3;
          break;
        case 3:
          c.softcap = 5.0;
          c.alibi = true;
          c.layout = Layout::kStridedLast;
          break;
        default:
          c.sinks = true;
          c.bias = DType::kF32;
          c.bias_masked = 0.3;
      }
      ExpectAttention(c, contexts.list());
    }
  }
}

// dbias of its own for every head streams out: each element once, zeros where a
// mask hides.
TEST(AttentionGrid, BiasGradientOnAnyNumberOfThreads) {
  const Contexts contexts({1, 3, 16});
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (int which = 0; which < (CasesOfSixteen() == 16 ? 4 : 1); ++which) {
      AttentionCase c;
      c.dtype = dtype;
      c.nq = which == 3 ? 611 : 640;
      c.nk = which == 3 ? 577 : 640;
      c.head_dim = c.value_dim = 64;
      c.bias = DType::kF32;
      c.want_dbias = true;
      c.causal = which == 0 ? Causal::kNone : Causal::kTopLeft;
      if (which == 2) c.window_left = 100;
      c.bias_masked = which == 1 ? 0.3 : 0.0;
      c.accumulate_dbias = which == 3;
      ExpectAttention(c, contexts.list());
    }
  }
}

// A boolean mask that hides little: blocks of few rows are all visible, large
// ones are not, and the sizes of blocks may go by the threads.
TEST(AttentionGrid, SparseMaskOnAnyNumberOfThreads) {
  const Contexts contexts({1, 2, 5, 16});
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    AttentionCase c;
    c.dtype = dtype;
    c.bias = DType::kBool;
    c.bias_masked = 3e-5;
    c.nq = CasesOfSixteen() == 16 ? 1100 : 500;
    c.nk = CasesOfSixteen() == 16 ? 1300 : 700;
    c.head_dim = c.value_dim = 64;
    ExpectAttention(c, contexts.list());
  }
}

// A sum over all queries, whatever blocks they come in.
TEST(AttentionGrid, SinkGradientOnAnyNumberOfThreads) {
  const Contexts contexts({1, 2, 5, 16});
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const bool packed : {false, true}) {
      AttentionCase c;
      c.dtype = dtype;
      c.heads = 2;
      c.kv_heads = 1;
      c.causal = Causal::kTopLeft;
      c.sinks = c.want_dsinks = true;
      c.nq = CasesOfSixteen() == 16 ? 1111 : 500;
      c.nk = CasesOfSixteen() == 16 ? 700 : 300;
      c.head_dim = c.value_dim = 64;
      if (packed) {
        c.lengths_q = {33, 0, 517, 90};
        c.lengths_k = {40, 3, 300, 95};
      }
      ExpectAttention(c, contexts.list());
    }
  }
}

// Grouped heads whose blocks are of other sizes on other numbers of threads.
TEST(AttentionGrid, GroupedHeadsOnAnyNumberOfThreads) {
  if (CasesOfSixteen() < 16) return;
  const Contexts contexts({1, 2, 5, 16});
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const int64_t window : {-1, 300}) {
      for (const Causal causal : {Causal::kNone, Causal::kTopLeft}) {
        AttentionCase c;
        c.dtype = dtype;
        c.causal = causal;
        c.window_left = window;
        c.nq = 1100;
        c.nk = 1300;
        c.heads = 2;
        c.kv_heads = 1;
        c.head_dim = c.value_dim = 64;
        ExpectAttention(c, contexts.list());
      }
    }
  }
}

}  // namespace
}  // namespace fa2::test
