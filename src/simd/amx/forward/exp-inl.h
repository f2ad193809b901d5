// SPDX-License-Identifier: Apache-2.0

// The exponentials of a sub-block of 32 keys x 32 queries in the forward pass
// on AMX, a row pair at a time, so that they can be taken between tile
// products.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_EXP_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_EXP_INL_H_

#include <cstring>

#include "src/simd/amx/elements-inl.h"
#include "src/simd/amx/stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// One sub-block whose exponentials are due.
struct ExpBlock {
  const uint8_t* s = nullptr;  // tiles [key half][query half]
  uint8_t* p = nullptr;  // first term, as right operand: [query half] tiles
  const uint16_t* keep = nullptr;  // of dropout, bits of 32 queries a key
  float scale = 0.0f;              // of what is in s, times log2(e)
  bool transformed = false;        // TransformScores has been over s
  bool large = false;              // of a Strip that is `large`
  // Of the 32 queries, times log2(e) and with ExpOrigin unless kMode is
  // kGeneral. With kAlibi, in whose sub-blocks all queries are on one side of
  // all keys, of row 0, and what each row adds.
  const float* max = nullptr;
  const float* row_penalty = nullptr;
  StreamFetch* fetch = nullptr;  // of bias to come

  // Half of the row pairs of either key half, which those of 8 then are.
  ExpBlock Half(int half) const {
    ExpBlock b = *this;
    b.s += half * 8 * 64;
    b.p += half * 4 * 64;
    if (keep != nullptr) b.keep += half * 16;
    if (row_penalty != nullptr) b.row_penalty += half * 8;
    return b;
  }
};

// The state of 32 queries whose exponentials are being taken.
struct ExpState {
  ScoreFactors factors;  // those of scores times log2(e)
  float* sum;            // added to
  int64_t term_bytes;
};

// Elements of a row pair: [row][query half].
struct RowPairVectors {
  Floats x[2][2];
};

// The first half of the work on a row pair of S, up to what is taken the
// exponential of. kGeneral: S holds the scores, with any options; kAlibi,
// kSoftcap: their option is worked in here; kBias: it is in S.
template <class Variant, FusedMode kMode>
HWY_INLINE void Exponents(const ExpState& state, const ExpBlock& b, int pair,
                          Floats scale, Floats max0, Floats max1,
                          RowPairVectors& out) {
  const FloatTag d;
  const ScoreFactors& f = state.factors;
  const int row = 2 * pair;
  const uint8_t* s = b.s + row / 16 * 2 * kTileBytes + row % 16 * 64;
  for (int r = 0; r < 2; ++r) {
    for (int h = 0; h < 2; ++h) {
      const Floats x = LoadRow(s + h * kTileBytes + r * 64);
      const Floats max = h == 0 ? max0 : max1;
      if constexpr (kMode == FusedMode::kGeneral) {
        // (S - max) log2(e), see InLog2.
        out.x[r][h] = hn::MulSub(hn::Sub(x, max), scale,
                                 hn::Set(d, ExpOrigin<Variant>()));
      } else if constexpr (kMode == FusedMode::kSoftcap) {
        out.x[r][h] =
            hn::MulSub(TanhOfSteps(hn::Mul(x, hn::Set(d, f.into_steps))),
                       hn::Set(d, f.softcap), max);
      } else if constexpr (kMode == FusedMode::kAlibi) {
        // The distance to a row is that to the first, less or more; additions
        // are not held up by the tile unit.
        out.x[r][h] = hn::MulSub(
            x, scale, hn::Add(max, hn::Set(d, b.row_penalty[row + r])));
      } else {
        out.x[r][h] = hn::MulSub(x, scale, max);
      }
    }
  }
}

// Terms of bf16 of what dropout keeps of the two rows: bits keep[0] and
// keep[1].
template <int kTerms>
HWY_INLINE void KeepTerms(const uint16_t* keep, Bf16s (&terms)[kTerms]) {
  uint32_t bits;
  memcpy(&bits, keep, sizeof(bits));
  for (int t = 0; t < kTerms; ++t) {
    terms[t] = hn::IfThenElseZero(Bf16MaskOf(bits), terms[t]);
  }
}

// The second half: P = exp(score - max), its sums, and as right operand what
// dropout keeps of it.
template <class Variant>
HWY_INLINE void ExpRowPair(const ExpState& state, const ExpBlock& b, int pair,
                           const RowPairVectors& exponents, Floats& sum0,
                           Floats& sum1) {
  constexpr int kTerms = Variant::kProbabilityTerms;
  Floats p00 = ProbabilityExp2<Variant>(exponents.x[0][0]);
  Floats p01 = ProbabilityExp2<Variant>(exponents.x[0][1]);
  Floats p10 = ProbabilityExp2<Variant>(exponents.x[1][0]);
  Floats p11 = ProbabilityExp2<Variant>(exponents.x[1][1]);
  sum0 = hn::Add(sum0, hn::Add(p00, p10));
  sum1 = hn::Add(sum1, hn::Add(p01, p11));
  Bf16s even[kTerms], odd[kTerms];
  SplitTerms<typename Variant::Tiles, kTerms, UpperBits>(p00, p01, even);
  SplitTerms<typename Variant::Tiles, kTerms, UpperBits>(p10, p11, odd);
  if (b.keep != nullptr) {
    KeepTerms(b.keep + 4 * pair, even);
    KeepTerms(b.keep + 4 * pair + 2, odd);
  }
  uint8_t* HWY_RESTRICT p = b.p + pair * 64;
  for (int t = 0; t < kTerms; ++t) {
    Bf16s low, high;
    InterleaveLanes(even[t], odd[t], low, high);
    StoreRow(low, p + t * state.term_bytes);
    StoreRow(high, p + t * state.term_bytes + kTileBytes);
  }
}

// The order of kRows row pairs of a sub-block, 16 or, of an ExpBlock's half, 8:
// those of the lower key half before those of the upper, but kAhead of these
// first. It is the order of sums, too.
template <int kRows, int kAhead>
struct RowOrder {
  static constexpr int kCount = kRows;
  static constexpr int At(int i) {
    constexpr int kLower = kRows / 2;
    return i < kAhead            ? 8 + i
           : i < kLower + kAhead ? i - kAhead
                                 : 8 + i - kLower;
  }
};

// The exponentials of a sub-block, row pair by row pair. Copies, not
// references: see FirstProducts.
template <class Variant, FusedMode kMode, class Order>
struct ExpRows {
  const ExpState state;
  const ExpBlock b;
  Floats scale, max0, max1, sum0, sum1;

  HWY_INLINE void Begin() {
    const FloatTag d;
    scale = hn::Set(d, b.scale);
    max0 = hn::LoadU(d, b.max);
    max1 = hn::LoadU(d, b.max + 16);
    sum0 = hn::LoadU(d, state.sum);
    sum1 = hn::LoadU(d, state.sum + 16);
  }
  HWY_INLINE void Take(int i) {
    if constexpr (kMode == FusedMode::kBias || kMode == FusedMode::kGeneral) {
      if (b.fetch != nullptr) b.fetch->Step();
    }
    RowPairVectors exponents;
    Exponents<Variant, kMode>(state, b, Order::At(i), scale, max0, max1,
                              exponents);
    ExpRowPair<Variant>(state, b, Order::At(i), exponents, sum0, sum1);
  }
  HWY_INLINE void End() const {
    const FloatTag d;
    hn::StoreU(sum0, d, state.sum);
    hn::StoreU(sum1, d, state.sum + 16);
  }
};

template <class Variant, FusedMode kMode, class Order>
HWY_NOINLINE void ExpAll(const ExpState& state, const ExpBlock& b) {
  ExpRows<Variant, kMode, Order> rows{state, b, {}, {}, {}, {}, {}};
  rows.Begin();
  for (int i = 0; i < Order::kCount; ++i) rows.Take(i);
  rows.End();
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_EXP_INL_H_
