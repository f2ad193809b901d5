// SPDX-License-Identifier: Apache-2.0

// The score step of the forward pass on AMX: S of a sub-block of 32 keys x 32
// queries by tile products, between which exponentials of the strip before are
// taken.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_SCORES_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_SCORES_INL_H_

#include "src/simd/amx/forward/exp-inl.h"
#include "src/simd/amx/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// The order of the row pairs whose exponentials are taken beside S. Four tiles
// of 1 KiB are stored meanwhile, one in each of the first four slots, and cover
// a page: a load waits for a store in flight whose low 12 address bits are its
// own. So the rows of the lower tiles are read first, while the upper ones are
// stored.
template <int kSteps, int kRows>
using ScoreRowOrder = RowOrder<kRows, kSteps == 0   ? 0
                                      : kSteps >= 8 ? 1
                                                    : kRows / (4 * kSteps)>;

// Where the tiles of a panel of K are, of one term: bytes between the rows of a
// tile, from the lower half of the keys to the upper, and from step to step.
struct KeyTiles {
  int64_t row, half, step;

  // Packed, with so many steps; as rows of bf16 that are `stride` elements
  // apart (ForwardBlock::k_stride).
  static KeyTiles Packed(int64_t steps) {
    return {64, steps * kTileBytes, kTileBytes};
  }
  static KeyTiles Lying(int64_t stride) {
    return {2 * stride, 32 * stride, 64};
  }
};

// S = K Q^T of a sub-block into the registers (stored by the next product),
// with the exponentials of kRows row pairs of `b` between the tile products
// unless kMode is kNone.
template <class Variant, int kSteps, FusedMode kMode, int kRows>
struct ForwardScoreLoop {
  static constexpr bool kExp = kMode != FusedMode::kNone;
  using Tiles = typename Variant::Tiles;
  static constexpr int kTerms = Variant::kInputTerms;
  using Pairs = TermPairs<kTerms, kTerms, Variant::kScoreTermLimit>;
  static constexpr int kStepSlots = Pairs::kCount * 4;

  const uint8_t* k;
  const KeyTiles& tiles;
  const uint8_t* q;
  int64_t steps;
  const PendingSquare pending;
  const ExpState& state;
  const ExpBlock& b;

  using RowWork = ExpRows<Variant, kMode, ScoreRowOrder<kSteps, kRows>>;

  template <int kOffset>
  HWY_INLINE void Rows(int64_t step, RowWork& r) const {
    if constexpr (kExp) {
      const int64_t slots = (kSteps > 0 ? kSteps : steps) * kStepSlots;
      const int64_t slot = step * kStepSlots + kOffset;
      for (int64_t row = slot * kRows / slots; row < (slot + 1) * kRows / slots;
           ++row) {
        r.Take(static_cast<int>(row));
      }
    }
  }

  template <int kFirst>
  struct RowsBetween {
    const ForwardScoreLoop& loop;
    int64_t step;
    RowWork& r;
    template <int kProduct>
    HWY_INLINE void After() const {
      loop.template Rows<kFirst + kProduct>(step, r);
    }
  };

  template <int kPair>
  HWY_INLINE void Pair(int64_t step, RowWork& r) const {
    constexpr TermPair kTerm = Pairs::Get(kPair);
    const int64_t half = (kSteps > 0 ? kSteps : steps) * kTileBytes;
    // Several terms are packed.
    const KeyTiles at =
        kTerms == 1 ? tiles : KeyTiles{64, half, int64_t{kTileBytes}};
    const uint8_t* a = k + 2 * kTerm.left * half + step * at.step;
    const uint8_t* right = q + 2 * kTerm.right * half + step * kTileBytes;
    if constexpr (Pairs::LoadsLeft(kPair)) {
      Tiles::template LoadStreaming<4>(a, at.row);
    }
    if constexpr (Pairs::LoadsRight(kPair)) {
      Tiles::template Load<6>(right, 64);
      Tiles::template Load<7>(right + half, 64);
    }
    if constexpr (Pairs::LoadsLeft(kPair)) {
      Tiles::template LoadStreaming<5>(a + at.half, at.row);
    }
    const RowsBetween<kPair * 4> between{*this, step, r};
    if (kPair == 0 && step == 0) {
      FirstProducts<Tiles, false>(pending, {}, between);
    } else {
      StepProducts<Tiles>(between);
    }
  }

  template <int... kPair>
  HWY_INLINE void Step(int64_t step, RowWork& r,
                       std::integer_sequence<int, kPair...>) const {
    (Pair<kPair>(step, r), ...);
  }

  template <int... kStep>
  HWY_INLINE void FixedSteps(RowWork& r,
                             std::integer_sequence<int, kStep...>) const {
    (Step(kStep, r, std::make_integer_sequence<int, Pairs::kCount>()), ...);
  }

  HWY_INLINE void Run() const {
    RowWork r{state, b, {}, {}, {}, {}, {}};
    if constexpr (kExp) r.Begin();
    if constexpr (kSteps > 0) {
      FixedSteps(r, std::make_integer_sequence<int, kSteps>());
    } else {
      for (int64_t step = 0; step < steps; ++step) {
        Step(step, r, std::make_integer_sequence<int, Pairs::kCount>());
      }
    }
    if constexpr (kExp) r.End();
  }
};

template <class Variant, int kSteps, FusedMode kMode, int kRows>
HWY_NOINLINE void ForwardScoreStep(const uint8_t* k, const KeyTiles& tiles,
                                   const uint8_t* q, int64_t steps, uint8_t* c,
                                   PendingSquare& pending,
                                   const ExpState& state, const ExpBlock& b) {
  using Tiles = typename Variant::Tiles;
  if (kSteps == 0 && steps == 0) {
    // A head dim of 0: S = 0.
    StorePending<Tiles>(pending);
    Tiles::template Zero<0>();
    Tiles::template Zero<1>();
    Tiles::template Zero<2>();
    Tiles::template Zero<3>();
    if (kMode != FusedMode::kNone) {
      ExpAll<Variant, kMode, ScoreRowOrder<kSteps, kRows>>(state, b);
    }
  } else {
    ForwardScoreLoop<Variant, kSteps, kMode, kRows>{k,       tiles, q, steps,
                                                    pending, state, b}
        .Run();
  }
  pending.c = c;
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_SCORES_INL_H_
