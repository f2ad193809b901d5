// SPDX-License-Identifier: Apache-2.0

// Tile products C += A B of packed operands for the AMX engines: always 2 x 2
// tiles of results (4 registers), two left and two right tiles, so that four
// loads feed four products.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_PRODUCTS_INL_H_
#define FA2_SRC_SIMD_AMX_PRODUCTS_INL_H_

#include <type_traits>
#include <utility>

#include "src/simd/amx/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

template <int kValue>
using Const = std::integral_constant<int, kValue>;

// Calls `call` with the steps of a product as a Const, where they are those of
// a usual head dim, whose loops are unrolled, else with Const<0>.
template <class Call>
HWY_INLINE void WithSteps(int64_t steps, const Call& call) {
  switch (steps) {
    case 2:
      return call(Const<2>());
    case 4:
      return call(Const<4>());
    case 8:
      return call(Const<8>());
    default:
      return call(Const<0>());
  }
}

// Products of terms that make up a product of sums of bf16 terms: those whose
// indices sum to less than kLimit; what is left out is 2^-8 smaller for each
// step of the limit. Ordered so that most steps keep an operand in its
// registers.
struct TermPair {
  int left;
  int right;
};

template <int kLeftTerms, int kRightTerms, int kLimit>
struct TermPairs {
  static constexpr int RightTerms(int left) {
    return kLimit - left < kRightTerms ? kLimit - left : kRightTerms;
  }
  static constexpr int Count() {
    int count = 0;
    for (int left = 0; left < kLeftTerms; ++left) count += RightTerms(left);
    return count;
  }
  static constexpr int kCount = Count();
  // Right terms down, then up, and so on: (0,1) (0,0) (1,0).
  static constexpr TermPair Get(int pair) {
    for (int left = 0; left < kLeftTerms; ++left) {
      const int n = RightTerms(left);
      if (pair < n) return {left, left % 2 == 0 ? n - 1 - pair : pair};
      pair -= n;
    }
    return {0, 0};
  }
  static constexpr bool LoadsLeft(int pair) {
    return pair == 0 || Get(pair).left != Get(pair - 1).left;
  }
  static constexpr bool LoadsRight(int pair) {
    return pair == 0 || Get(pair).right != Get(pair - 1).right;
  }
};

// Results that are still in tile registers 0-3 and where they go. Storing them
// between the first tile products of the next block hides the wait for the last
// product (22 -> 16.5 cycles a product, 16 being the limit).
struct PendingTiles {
  uint8_t* c;
  int64_t row;     // bytes from C(i, j) to C(i + 1, j)
  int64_t column;  // and to C(i, j + 1)
};

// The same where the four tiles lie side by side, as S of a sub-block does.
struct PendingSquare {
  static constexpr int64_t row = 2 * kTileBytes;
  static constexpr int64_t column = kTileBytes;
  uint8_t* c;
};

template <class Tiles, class Pending>
HWY_INLINE void StorePending(const Pending p) {
  Tiles::template Store<0>(p.c);
  Tiles::template Store<1>(p.c + p.column);
  Tiles::template Store<2>(p.c + p.row);
  Tiles::template Store<3>(p.c + p.row + p.column);
}

// Where the tiles of an operand are: Tile(term, i, k) for the row or column i
// in {0, 1} of the 2 x 2 block and step k.
template <class Tiles, class Left, class Right, int kPair, class Pairs>
HWY_INLINE void LoadPair(const Left& left, const Right& right, int64_t k) {
  constexpr TermPair kTerm = Pairs::Get(kPair);
  if constexpr (Pairs::LoadsLeft(kPair)) {
    left.template Load<Tiles, 4>(kTerm.left, 0, k);
  }
  if constexpr (Pairs::LoadsRight(kPair)) {
    right.template Load<Tiles, 6>(kTerm.right, 0, k);
    right.template Load<Tiles, 7>(kTerm.right, 1, k);
  }
  if constexpr (Pairs::LoadsLeft(kPair)) {
    left.template Load<Tiles, 5>(kTerm.left, 1, k);
  }
}

// What comes between single tile products; here nothing.
struct NothingBetween {
  template <int kProduct>
  HWY_INLINE void After() const {}
};

// The products of a step: registers 4 and 5 times 6 and 7 join 0 to 3.
template <class Tiles, class Between>
HWY_INLINE void StepProducts(const Between& between) {
  Tiles::template Dot<0, 4, 6>();
  between.template After<0>();
  Tiles::template Dot<1, 4, 7>();
  between.template After<1>();
  Tiles::template Dot<2, 5, 6>();
  between.template After<2>();
  Tiles::template Dot<3, 5, 7>();
  between.template After<3>();
}

template <class Tiles, bool kAdd, int kTile>
HWY_INLINE void StartTile(const uint8_t* c) {
  if constexpr (kAdd) {
    Tiles::template Load<kTile>(c, 64);
  } else {
    Tiles::template Zero<kTile>();
  }
}

// Those of the first step, which take 0 to 3 over from what is pending and
// start from C if kAdd, else from 0. By value: four tiles cover a page, and
// what is read from memory after one of them may wait until it has been
// written.
template <class Tiles, bool kAdd, class Pending, class Between>
HWY_INLINE void FirstProducts(const Pending pending, const Pending c,
                              const Between& between) {
  Tiles::template Store<0>(pending.c);
  StartTile<Tiles, kAdd, 0>(c.c);
  Tiles::template Dot<0, 4, 6>();
  between.template After<0>();
  Tiles::template Store<1>(pending.c + pending.column);
  StartTile<Tiles, kAdd, 1>(c.c + c.column);
  Tiles::template Dot<1, 4, 7>();
  between.template After<1>();
  Tiles::template Store<2>(pending.c + pending.row);
  StartTile<Tiles, kAdd, 2>(c.c + c.row);
  Tiles::template Dot<2, 5, 6>();
  between.template After<2>();
  Tiles::template Store<3>(pending.c + pending.row + pending.column);
  StartTile<Tiles, kAdd, 3>(c.c + c.row + c.column);
  Tiles::template Dot<3, 5, 7>();
  between.template After<3>();
}

template <class Tiles, class Left, class Right, class Pairs, int kPair>
HWY_INLINE void PairStep(const Left& left, const Right& right, int64_t k) {
  LoadPair<Tiles, Left, Right, kPair, Pairs>(left, right, k);
  StepProducts<Tiles>(NothingBetween());
}

template <class Tiles, class Left, class Right, class Pairs, int... kPair>
HWY_INLINE void PairSteps(const Left& left, const Right& right, int64_t k,
                          std::integer_sequence<int, kPair...>) {
  (PairStep<Tiles, Left, Right, Pairs, kPair>(left, right, k), ...);
}

template <class Tiles, class Left, class Right, class Pairs, int... kPair>
HWY_INLINE void LaterPairSteps(const Left& left, const Right& right,
                               [[maybe_unused]] int64_t k,
                               std::integer_sequence<int, kPair...>) {
  (PairStep<Tiles, Left, Right, Pairs, kPair + 1>(left, right, k), ...);
}

// What runs between the tile products of a step and the next; here nothing.
struct NoSideWork {
  HWY_INLINE void Step() const {}
};

// Prefetches the accumulator `next` during the product before it, of so many
// steps, beside other side work: the first tile products would wait for it (32
// x 32 scores of dV or dK at D 128: 341 -> 314 cycles, D 256: 667 -> 595; dQ^T
// at D 128: 3%).
template <class Side>
class AccumulatorFetch {
 public:
  explicit AccumulatorFetch(Side& side) : side_(side) {}
  HWY_INLINE void Begin(const PendingTiles& next, int64_t steps) {
    next_ = next;
    line_ = 0;
    each_ = steps > 0 ? (kLines + steps - 1) / steps : 0;
  }
  HWY_INLINE void Step() {
    for (int64_t i = 0; i < each_ && line_ < kLines; ++i, ++line_) {
      hwy::Prefetch(next_.c + line_ / 32 * next_.row +
                    line_ / 16 % 2 * next_.column + line_ % 16 * 64);
    }
    side_.Step();
  }

 private:
  static constexpr int64_t kLines = 64;  // of 2 x 2 tiles
  Side& side_;
  PendingTiles next_ = {};
  int64_t line_ = kLines;
  int64_t each_ = 0;
};

// Leaves C = (kAdd ? C : 0) + sum over k in [first, last) in registers 0-3, to
// be stored by whoever comes next. first < last.
template <class Variant, bool kAdd, class Left, class Right, class Pending,
          class Side>
HWY_INLINE void Product(const Left& left, const Right& right, int64_t first,
                        int64_t last, const Pending& c, Pending& pending,
                        Side& side) {
  using Tiles = typename Variant::Tiles;
  using Pairs = TermPairs<Left::kTerms, Right::kTerms, Variant::kTermLimit>;
  LoadPair<Tiles, Left, Right, 0, Pairs>(left, right, first);
  FirstProducts<Tiles, kAdd>(pending, c, NothingBetween());
  LaterPairSteps<Tiles, Left, Right, Pairs>(
      left, right, first, std::make_integer_sequence<int, Pairs::kCount - 1>());
  pending = c;
  side.Step();
  for (int64_t k = first + 1; k < last; ++k) {
    PairSteps<Tiles, Left, Right, Pairs>(
        left, right, k, std::make_integer_sequence<int, Pairs::kCount>());
    side.Step();
  }
}

// As above with the choice of kAdd at run time, and C = 0 or left alone when
// there is nothing to add.
template <class Variant, class Left, class Right, class Pending, class Side>
HWY_INLINE void ProductOrZero(const Left& left, const Right& right,
                              int64_t first, int64_t last, bool add,
                              const Pending& c, Pending& pending, Side& side) {
  using Tiles = typename Variant::Tiles;
  if (first >= last) {
    if (add) return;
    StorePending<Tiles>(pending);
    Tiles::template Zero<0>();
    Tiles::template Zero<1>();
    Tiles::template Zero<2>();
    Tiles::template Zero<3>();
    pending = c;
  } else if (add) {
    Product<Variant, true>(left, right, first, last, c, pending, side);
  } else {
    Product<Variant, false>(left, right, first, last, c, pending, side);
  }
}

// Whole tiles at base + term * term_bytes + i * i_bytes + k * 1 KiB.
template <int kTermCount, bool kStream>
struct TileStrip {
  static constexpr int kTerms = kTermCount;
  const uint8_t* base;
  int64_t term_bytes;
  int64_t i_bytes;
  template <class Tiles, int kRegister>
  HWY_INLINE void Load(int term, int64_t i, int64_t k) const {
    const uint8_t* p = base + term * term_bytes + i * i_bytes + k * kTileBytes;
    if constexpr (kStream) {
      Tiles::template LoadStreaming<kRegister>(p, 64);
    } else {
      Tiles::template Load<kRegister>(p, 64);
    }
  }
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_PRODUCTS_INL_H_
