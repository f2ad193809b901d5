// SPDX-License-Identifier: Apache-2.0

// Register blocks of 6 rows x 4 vectors whose sums go to a sink that has work
// to do with them, forward_sink-inl.h: the columns of a block in two halves of
// which one is half a sum behind the other, so that what the sink does with
// one stands between the multiply-adds of the other.
//
// As one block, its 24 sums would be ready at once: the sink's work would wait
// in the scheduler for the last multiply-adds and keep the next ones out of it,
// and cost twice what its instructions do (Bf16Dot's forward on Zen 5, N 2048:
// D 64 0.815 -> 0.83, D 128 0.87 -> 0.885 of the peak).

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_STAGGERED_BLOCKS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_STAGGERED_BLOCKS_INL_H_
#undef FA2_SRC_SIMD_LANE_STAGGERED_BLOCKS_INL_H_
#else
#define FA2_SRC_SIMD_LANE_STAGGERED_BLOCKS_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/lane/register_block-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Turns of one half alone, while the sink takes the other. With two, whose
// steps each make room for as much of the sink's work, 1% slower; with six too,
// since 12 sums alone hardly hide VDPBF16PS's latency of six cycles.
inline constexpr size_t kSinkTurns = 4;
inline constexpr size_t kLeastStaggeredSteps = kSinkTurns * kTurn;

// `blocks` blocks below one another, A by rows and in one segment. As with any
// sink that is not memory, `add`, C and its factors do not count.
template <class Op, class D, class Sink>
HWY_NOINLINE void StaggeredBlocks(
    D d, size_t blocks,
    const Product<typename Op::Element, typename Op::Sum>& product, Sink sink) {
  using V = hn::Vec<D>;
  using Element = typename Op::Element;
  const size_t lanes = hn::Lanes(d);
  const size_t a_row = product.a_row;
  const size_t b_step = kBlockVectors * lanes;
  const size_t turns = product.steps / kTurn;
  const size_t last_steps = product.steps % kTurn;
  const size_t together = (turns - kSinkTurns) / 2;
  const size_t next_step = product.next_step / 2;
  const char* next =
      next_step == 0 ? reinterpret_cast<const char*>(product.b) : product.next;
  const Element* HWY_RESTRICT a_block = product.a;
  const Element *xa, *xa3, *xb, *ya, *ya3, *yb;
  // Names as in RegisterBlock: x has columns 0 and 1, y columns 2 and 3.
  V x00, x01, x10, x11, x20, x21, x30, x31, x40, x41, x50, x51;
  V y00, y01, y10, y11, y20, y21, y30, y31, y40, y41, y50, y51;
#define FA2_BEGIN(u, col)                                           \
  u##00 = hn::Zero(d), u##01 = u##00, u##10 = u##00, u##11 = u##00; \
  u##20 = u##00, u##21 = u##00, u##30 = u##00, u##31 = u##00;       \
  u##40 = u##00, u##41 = u##00, u##50 = u##00, u##51 = u##00;       \
  u##a = a_block;                                                   \
  u##a3 = a_block + 3 * a_row;                                      \
  u##b = product.b + (col);
#define FA2_SUM(c, b)               \
  {                                 \
    c = Op::Accumulate(left, b, c); \
    Settle(c);                      \
  }
#define FA2_ROW(u, i)                                                     \
  {                                                                       \
    const auto left =                                                     \
        Op::Left(d, ((i) < 3 ? u##a : u##a3) + ((i) % 3) * a_row + step); \
    FA2_SUM(u##i##0, b0)                                                  \
    FA2_SUM(u##i##1, b1)                                                  \
  }
#define FA2_STEP(u, s)                                          \
  {                                                             \
    constexpr size_t step = s;                                  \
    const auto b0 = Op::Right(d, u##b + step * b_step);         \
    const auto b1 = Op::Right(d, u##b + step * b_step + lanes); \
    FA2_ROW(u, 0)                                               \
    FA2_ROW(u, 1)                                               \
    FA2_ROW(u, 2)                                               \
    FA2_ROW(u, 3)                                               \
    FA2_ROW(u, 4)                                               \
    FA2_ROW(u, 5)                                               \
  }
#define FA2_ON(u, steps)    \
  {                         \
    u##a += steps;          \
    u##a3 += steps;         \
    u##b += (steps)*b_step; \
  }
#define FA2_FETCH()    \
  {                    \
    PrefetchL2(next);  \
    next += next_step; \
  }
#define FA2_ALONE(u) \
  {                  \
    FA2_FETCH()      \
    FA2_STEP(u, 0)   \
    FA2_STEP(u, 1)   \
    FA2_STEP(u, 2)   \
    FA2_STEP(u, 3)   \
    FA2_ON(u, kTurn) \
  }
#define FA2_TOGETHER() \
  {                    \
    FA2_FETCH()        \
    FA2_STEP(x, 0)     \
    FA2_STEP(y, 0)     \
    FA2_STEP(x, 1)     \
    FA2_STEP(y, 1)     \
    FA2_FETCH()        \
    FA2_STEP(x, 2)     \
    FA2_STEP(y, 2)     \
    FA2_STEP(x, 3)     \
    FA2_STEP(y, 3)     \
    FA2_ON(x, kTurn)   \
    FA2_ON(y, kTurn)   \
  }
#define FA2_LAST(u)                         \
  for (size_t i = 0; i < last_steps; ++i) { \
    FA2_STEP(u, 0)                          \
    FA2_ON(u, 1)                            \
  }
// Column j of v to the sink, with two turns of u.
#define FA2_WITH(u, v, j, col)                              \
  {                                                         \
    V total, rounded;                                       \
    FA2_FETCH()                                             \
    sink.Open(d, col, total, rounded);                      \
    FA2_STEP(u, 0)                                          \
    FA2_STEP(u, 1)                                          \
    sink.Pair(d, 0, col, v##0##j, v##1##j, total, rounded); \
    FA2_STEP(u, 2)                                          \
    FA2_STEP(u, 3)                                          \
    FA2_ON(u, kTurn)                                        \
    FA2_FETCH()                                             \
    sink.Pair(d, 2, col, v##2##j, v##3##j, total, rounded); \
    FA2_STEP(u, 0)                                          \
    FA2_STEP(u, 1)                                          \
    sink.Pair(d, 4, col, v##4##j, v##5##j, total, rounded); \
    FA2_STEP(u, 2)                                          \
    FA2_STEP(u, 3)                                          \
    FA2_ON(u, kTurn)                                        \
    sink.Close(d, col, total, rounded);                     \
  }
  FA2_BEGIN(x, 0)
  for (size_t i = 0; i < together; ++i) FA2_ALONE(x)
  for (size_t block = 0; block < blocks; ++block) {
    if (block == 0) {
      for (size_t i = 0; i < kSinkTurns; ++i) FA2_ALONE(x)
    } else {
      FA2_WITH(x, y, 0, 2 * lanes)
      FA2_WITH(x, y, 1, 3 * lanes)
      sink.Advance(kBlockRows);
    }
    if (turns % 2 != 0) FA2_ALONE(x)
    FA2_BEGIN(y, 2 * lanes)
    for (size_t i = 0; i < together; ++i) FA2_TOGETHER()
    FA2_LAST(x)
    FA2_WITH(y, x, 0, 0)
    FA2_WITH(y, x, 1, lanes)
    if (turns % 2 != 0) FA2_ALONE(y)
    if (block + 1 < blocks) {
      a_block += kBlockRows * a_row;
      FA2_BEGIN(x, 0)
      for (size_t i = 0; i < together; ++i) FA2_TOGETHER()
    } else {
      for (size_t i = 0; i < together; ++i) FA2_ALONE(y)
    }
    FA2_LAST(y)
  }
  sink.template Column<kBlockRows>(d, 2 * lanes, y00, y10, y20, y30, y40, y50);
  sink.template Column<kBlockRows>(d, 3 * lanes, y01, y11, y21, y31, y41, y51);
#undef FA2_BEGIN
#undef FA2_SUM
#undef FA2_ROW
#undef FA2_STEP
#undef FA2_ON
#undef FA2_FETCH
#undef FA2_ALONE
#undef FA2_TOGETHER
#undef FA2_LAST
#undef FA2_WITH
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
