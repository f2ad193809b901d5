// SPDX-License-Identifier: Apache-2.0

// The score step of the backward pass on AMX: S and dP of a sub-block of 32
// keys x 32 queries, and the fused pass over the sub-block before, whose row
// pairs run between single tile products, so that vector and tile units work at
// once.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_BACKWARD_SCORES_INL_H_
#define FA2_SRC_SIMD_AMX_BACKWARD_SCORES_INL_H_

#include "src/simd/amx/backward/fused_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Operands of the products of one sub-block; `*_half` is the distance between
// its two groups of 16 rows, and half that between terms.
struct ScoreOperands {
  const uint8_t* k;
  const uint8_t* q;
  const uint8_t* v;
  const uint8_t* dout;
  int64_t qk_half;
  int64_t vo_half;
  // What S starts from, where kStarts: tiles [key half][query half] whose rows
  // are so many bytes apart (0: one row for all).
  const uint8_t* s_start;
  int64_t s_start_row;
  const float* tile_start;  // of dP: -delta, 32 queries
  uint8_t* lead[2][2];      // where the first of both products goes
  uint8_t* follow[2][2];    // and the second of the sub-block before
  int64_t steps_qk;         // head dim / 32
  int64_t steps_vo;
};

// The loop over the steps of both products, with the fused pass's row pairs in
// the slots after each tile product, as many as keep pace. kSteps is the head
// dim / 32 of both products, or 0 for any, read at run time. kLead is the
// product that comes first, 0 (S) or 1 (dP). kStarts: S starts from
// ScoreOperands::s_start, else from 0.
template <class Variant, int kPanelTiles, FusedMode kMode, int kSteps,
          int kLead, bool kStarts>
struct ScoreLoop {
  using Tiles = typename Variant::Tiles;
  static constexpr int kTerms = Variant::kInputTerms;
  // Of S (product 0) and dP.
  template <int kProduct>
  using Pairs =
      TermPairs<kTerms, kTerms,
                kProduct == 0 ? Variant::kScoreTermLimit : Variant::kTermLimit>;
  template <int kProduct>
  static constexpr int kStepSlots = Pairs<kProduct>::kCount * 4;
  // Those of the leading product before the other's, but where kSteps is 0.
  template <int kProduct>
  static constexpr int kSlotsBefore =
      kProduct == kLead ? 0 : kSteps* Pairs<kLead>::kCount * 4;
  // With 4 or 8 steps a product, dP reads its quarter pages in the order 2, 3,
  // 0, 1, and the row pairs beside it follow, so that stores of the last steps
  // of one product are far from the first loads of the next. That is dP's order
  // when it leads, too: which product leads depends on the sizes of blocks, of
  // which sums must not know.
  static constexpr int kSwap = kSteps > 0 && kSteps % 4 == 0 ? 2 : 0;

  // Copies: see FirstProducts (backward 0.5-1%).
  const ScoreOperands o;
  const FusedContext c;
  const FusedBlock fused;
  int64_t slots;  // of both products, when kSteps is 0

  static constexpr int RowPair(int row) {
    const bool beside_dp = (row < 8) == (kLead == 1);
    return kSwap == 0 || !beside_dp ? row : row ^ (kSwap * 8 / kSteps);
  }

  template <int kFirst, int kLast>
  HWY_INLINE void RowRange(Floats scale, Floats lse0, Floats lse1) const {
    if constexpr (kFirst < kLast) {
      FuseRows<Variant, kPanelTiles, kMode>(c, fused, RowPair(kFirst), scale,
                                            lse0, lse1);
      if constexpr (kStarts) fused.fetch->Step();
      RowRange<kFirst + 1, kLast>(scale, lse0, lse1);
    }
  }

  // The rows due after slot base + kOffset, base being a Const or a number.
  template <int kOffset, class Base>
  HWY_INLINE void Rows(Base base, Floats scale, Floats lse0,
                       Floats lse1) const {
    if constexpr (kMode == FusedMode::kNone) {
      return;
    } else if constexpr (kSteps > 0) {
      constexpr int kSlots = kSteps * (kStepSlots<0> + kStepSlots<1>);
      constexpr int kSlot = Base::value + kOffset;
      RowRange<kSlot * 16 / kSlots, (kSlot + 1) * 16 / kSlots>(scale, lse0,
                                                               lse1);
    } else {
      const int64_t slot = base + kOffset;
      for (int64_t row = slot * 16 / slots; row < (slot + 1) * 16 / slots;
           ++row) {
        FuseRows<Variant, kPanelTiles, kMode>(c, fused, static_cast<int>(row),
                                              scale, lse0, lse1);
      }
    }
  }

  template <int kProduct, int kPair, class Base>
  HWY_INLINE void Step(int64_t step, Base base, bool first, Floats scale,
                       Floats lse0, Floats lse1) const {
    using Terms = Pairs<kProduct>;
    constexpr TermPair kTerm = Terms::Get(kPair);
    const int64_t half = kProduct == 0 ? o.qk_half : o.vo_half;
    const uint8_t* a =
        (kProduct == 0 ? o.k : o.v) + 2 * kTerm.left * half + step * kTileBytes;
    const uint8_t* b = (kProduct == 0 ? o.q : o.dout) + 2 * kTerm.right * half +
                       step * kTileBytes;
    if constexpr (Terms::LoadsLeft(kPair)) Tiles::template Load<4>(a, 64);
    if constexpr (Terms::LoadsRight(kPair)) {
      Tiles::template LoadStreaming<6>(b, 64);
      Tiles::template LoadStreaming<7>(b + half, 64);
    }
    if constexpr (Terms::LoadsLeft(kPair)) {
      Tiles::template Load<5>(a + half, 64);
    }
    if (kPair == 0 && first) {
      StartProduct<kProduct>(base, scale, lse0, lse1);
    } else {
      Tiles::template Dot<0, 4, 6>();
      Rows<kPair * 4>(base, scale, lse0, lse1);
      Tiles::template Dot<1, 4, 7>();
      Rows<kPair * 4 + 1>(base, scale, lse0, lse1);
      Tiles::template Dot<2, 5, 6>();
      Rows<kPair * 4 + 2>(base, scale, lse0, lse1);
      Tiles::template Dot<3, 5, 7>();
    }
    Rows<kPair * 4 + 3>(base, scale, lse0, lse1);
  }

  // The first four tile products, between which the results of the product
  // before leave, since the tile unit would wait for them; and between those
  // stores row pairs, as soon as they may (D 64: 701 -> 654 cycles a
  // sub-block). The first half of them reads the rows that the first two stores
  // of the leading product are of; which half is not known where kSteps is 0.
  template <int kProduct, class Base>
  HWY_INLINE void StartProduct(Base base, Floats scale, Floats lse0,
                               Floats lse1) const {
    constexpr int kAfter = kSteps == 0 ? 3 : kProduct == kLead ? 1 : 0;
    Start<kProduct, 0, 4, 6, 0, 0>();
    if constexpr (kAfter == 0) Rows<0>(base, scale, lse0, lse1);
    Start<kProduct, 1, 4, 7, 0, 1>();
    if constexpr (kAfter <= 1) Rows<1 - kAfter>(base, scale, lse0, lse1);
    Start<kProduct, 2, 5, 6, 1, 0>();
    if constexpr (kAfter <= 1) Rows<2 - kAfter>(base, scale, lse0, lse1);
    Start<kProduct, 3, 5, 7, 1, 1>();
    if constexpr (kAfter == 3) {
      Rows<0>(base, scale, lse0, lse1);
      Rows<1>(base, scale, lse0, lse1);
    }
    if constexpr (kAfter >= 1) Rows<2>(base, scale, lse0, lse1);
  }

  template <int kProduct, int kC, int kA, int kB, int kKeyHalf, int kQueryHalf>
  HWY_INLINE void Start() const {
    Clear<kProduct, kC, kKeyHalf, kQueryHalf>();
    Tiles::template Dot<kC, kA, kB>();
  }

  // Stores what the product before left and gives this one its first value.
  template <int kProduct, int kC, int kKeyHalf, int kQueryHalf>
  HWY_INLINE void Clear() const {
    Tiles::template Store<kC>(
        (kProduct == kLead ? o.follow : o.lead)[kKeyHalf][kQueryHalf]);
    if constexpr (kProduct == 0) {
      if constexpr (kStarts) {
        Tiles::template Load<kC>(
            o.s_start + (2 * kKeyHalf + kQueryHalf) * 16 * o.s_start_row,
            o.s_start_row);
      } else {
        Tiles::template Zero<kC>();
      }
    } else {
      Tiles::template Load<kC>(o.tile_start + 16 * kQueryHalf, 0);
    }
  }

  template <int kProduct, class Base, int... kPair>
  HWY_INLINE void StepPairs(int64_t step, Base base, bool first, Floats scale,
                            Floats lse0, Floats lse1,
                            std::integer_sequence<int, kPair...>) const {
    (Step<kProduct, kPair>(step, base, first, scale, lse0, lse1), ...);
  }

  template <int kProduct, int... kStep>
  HWY_INLINE void FixedSteps(Floats scale, Floats lse0, Floats lse1,
                             std::integer_sequence<int, kStep...>) const {
    (StepPairs<kProduct>(
         kProduct == 0 ? kStep : kStep ^ kSwap,
         Const<kSlotsBefore<kProduct> + kStep * kStepSlots<kProduct>>(),
         kStep == 0, scale, lse0, lse1,
         std::make_integer_sequence<int, Pairs<kProduct>::kCount>()),
     ...);
  }

  template <int kProduct>
  HWY_INLINE void RunProduct(Floats scale, Floats lse0, Floats lse1) const {
    if constexpr (kSteps > 0) {
      FixedSteps<kProduct>(scale, lse0, lse1,
                           std::make_integer_sequence<int, kSteps>());
    } else {
      const int64_t steps = kProduct == 0 ? o.steps_qk : o.steps_vo;
      const int64_t before = kProduct == 0 ? 0 : o.steps_qk * kStepSlots<0>;
      if (steps == 0) {
        Clear<kProduct, 0, 0, 0>();
        Clear<kProduct, 1, 0, 1>();
        Clear<kProduct, 2, 1, 0>();
        Clear<kProduct, 3, 1, 1>();
      }
      for (int64_t step = 0; step < steps; ++step) {
        StepPairs<kProduct>(
            step, before + step * kStepSlots<kProduct>, step == 0, scale, lse0,
            lse1, std::make_integer_sequence<int, Pairs<kProduct>::kCount>());
      }
    }
  }
};

// S and dP of one sub-block; the second of them stays in tile registers 0-3, to
// be stored by the next call. `fused` is the sub-block before.
template <class Variant, int kPanelTiles, FusedMode kMode, int kSteps,
          int kLead, bool kStarts>
HWY_NOINLINE void ScoreStep(const ScoreOperands& o, const FusedContext& c,
                            const FusedBlock& fused) {
  using Loop = ScoreLoop<Variant, kPanelTiles, kMode, kSteps, kLead, kStarts>;
  const Loop loop{o, c, fused,
                  o.steps_qk * Loop::template kStepSlots<0> +
                      o.steps_vo * Loop::template kStepSlots<1>};
  const FloatTag d;
  Floats scale = hn::Zero(d), lse0 = scale, lse1 = scale;
  if (kMode != FusedMode::kNone) {
    scale = hn::Set(d, c.Factors<Variant>(kMode).scale);
    lse0 = hn::LoadU(d, fused.Lse<Variant>(kMode));
    lse1 = hn::LoadU(d, fused.Lse<Variant>(kMode) + 16);
  }
  loop.template RunProduct<kLead>(scale, lse0, lse1);
  loop.template RunProduct<1 - kLead>(scale, lse0, lse1);
  if (kMode != FusedMode::kNone && loop.slots == 0) {
    FuseAll<Variant, kPanelTiles, kMode>(c, fused);
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_BACKWARD_SCORES_INL_H_
