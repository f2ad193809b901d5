// SPDX-License-Identifier: Apache-2.0

// The value step of the forward pass on AMX: O^T += V^T P^T of a strip, with
// exponentials of the next strip between the tile products.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_VALUES_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_VALUES_INL_H_

#include "src/simd/amx/forward/exp-inl.h"
#include "src/simd/amx/forward/strip-inl.h"
#include "src/simd/amx/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// V and O of a block, as O^T += V^T P^T of strips takes them: two column tiles,
// 32 columns, at a time.
template <class Variant>
class ForwardValues {
  static constexpr int kTerms = Variant::kInputTerms;

 public:
  using Unbroken = TileStrip<kTerms, true>;

  explicit ForwardValues(const ForwardBlock& block)
      : b_(block), pairs_(amx::DepthTiles(block.value_dim)) {}

  // Pairs of column tiles.
  int64_t pairs() const { return pairs_; }
  int64_t OutputBytes() const { return pairs_ * 4 * kTileBytes; }
  uint8_t* Output(int64_t query) const {
    return static_cast<uint8_t*>(b_.out) + query * OutputBytes();
  }

  // Nothing has been written to the accumulator of the strip's queries.
  bool Starts(const Strip& strip) const { return b_.first && strip.first; }

  // V of an unbroken strip, the first pair of column tiles; the next one is two
  // i_bytes from there.
  Unbroken UnbrokenOf(const Strip& strip) const {
    const StripValues<kTerms> v = ValuesOf(strip);
    return {v.base + (strip.key[0] - strip.chunk) * kTileBytes, v.term_bytes,
            v.column_bytes};
  }

  // O^T += V^T P^T of a strip; P by `right`.
  template <class Right, class Side>
  void Add(const Strip& strip, const Right& right, PendingSquare& pending,
           Side& side) const {
    if (strip.unbroken()) {
      AddBy(UnbrokenOf(strip), right, strip, pending, side);
    } else {
      AddBy(ValuesOf(strip), right, strip, pending, side);
    }
  }

 private:
  StripValues<kTerms> ValuesOf(const Strip& strip) const {
    const int64_t column_bytes = strip.in_chunk * kTileBytes;
    return {static_cast<const uint8_t*>(b_.v_grad) +
                strip.chunk * 2 * pairs_ * kTerms * kTileBytes,
            2 * pairs_ * column_bytes, column_bytes, strip};
  }

  template <class Left, class Right, class Side>
  void AddBy(Left left, const Right& right, const Strip& strip,
             PendingSquare& pending, Side& side) const {
    const bool add = !Starts(strip);
    const int64_t pair_bytes = 2 * strip.in_chunk * kTileBytes;
    PendingSquare out{Output(strip.query)};
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      ProductOrZero<Variant>(left, right, 0, strip.count, add, out, pending,
                             side);
      left.base += pair_bytes;
      out.c += 4 * kTileBytes;
    }
  }

  const ForwardBlock& b_;
  const int64_t pairs_;
};

// Two column tiles of O^T += V^T P^T of a strip of kPanels sub-blocks, left in
// the registers, with the exponentials of `b` between the tile products, from
// step kFrom on.
template <class Variant, FusedMode kMode, int kPanels, int kFrom, class Left,
          class Right>
struct ForwardValueLoop {
  using Tiles = typename Variant::Tiles;
  // As in ScoreRowOrder: in the first step what the products before left is
  // stored.
  using RowWork = ExpRows<Variant, kMode, RowOrder<16, kFrom == 0 ? 2 : 0>>;

  // Copies, not references: see FirstProducts.
  const Left left;
  const Right right;
  const PendingSquare c;
  const PendingSquare pending;

  template <int kStep>
  struct RowsBetween {
    RowWork& r;
    template <int kProduct>
    HWY_INLINE void After() const {
      constexpr int kSlots = 4 * (kPanels - kFrom);
      constexpr int kSlot = 4 * (kStep - kFrom) + kProduct;
      if constexpr (kSlot >= 0) {
        for (int row = kSlot * 16 / kSlots; row < (kSlot + 1) * 16 / kSlots;
             ++row) {
          r.Take(row);
        }
      }
    }
  };

  template <int kStep>
  HWY_INLINE void Step(RowWork& r) const {
    using Pairs = TermPairs<1, 1, 1>;
    LoadPair<Tiles, Left, Right, 0, Pairs>(left, right, kStep);
    const RowsBetween<kStep> between{r};
    if constexpr (kStep == 0) {
      FirstProducts<Tiles, true>(pending, c, between);
    } else {
      StepProducts<Tiles>(between);
    }
  }

  template <int... kStep>
  HWY_INLINE void Steps(RowWork& r,
                        std::integer_sequence<int, kStep...>) const {
    (Step<kStep>(r), ...);
  }

  HWY_INLINE void Run(const ExpState& state, const ExpBlock& b) const {
    RowWork r{state, b, {}, {}, {}, {}, {}};
    r.Begin();
    Steps(r, std::make_integer_sequence<int, kPanels>());
    r.End();
  }
};

template <class Variant, FusedMode kMode, int kPanels, int kFrom, class Left,
          class Right>
HWY_NOINLINE void ForwardValueStep(const Left& left, const Right& right,
                                   const PendingSquare c,
                                   PendingSquare& pending,
                                   const ExpState& state, const ExpBlock& b) {
  ForwardValueLoop<Variant, kMode, kPanels, kFrom, Left, Right>{left, right, c,
                                                                pending}
      .Run(state, b);
  pending = c;
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_VALUES_INL_H_
