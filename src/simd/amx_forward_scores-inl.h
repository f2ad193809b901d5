// The score step of the forward pass on AMX: S of a sub-block of 32 keys x 32
// queries by tile products, between which the exponentials of a sub-block of
// the strip before are taken, a row pair at a time; and the pass over a strip
// that masks, transforms and finds the row maxima.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_SCORES_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_SCORES_INL_H_

#include "src/simd/amx_elements-inl.h"
#include "src/simd/amx_products-inl.h"
#include "src/simd/amx_stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// One sub-block whose exponentials are due.
struct ExpBlock {
  const uint8_t* s = nullptr;  // tiles [key half][query half]
  uint8_t* p = nullptr;  // first term, as right operand: [query half] tiles
  const uint16_t* keep = nullptr;  // of dropout, bits of 32 queries a key
  float scale = 0.0f;              // of what is in s, times log2(e)
  bool transformed = false;        // TransformScores has been over s
  // Of the 32 queries, times log2(e) and with ExpOrigin unless kMode is kBias.
  // With kAlibi, in
  // whose sub-blocks all queries are on one side of all keys, of row 0, and
  // what each row adds.
  const float* max = nullptr;
  const float* row_penalty = nullptr;
  StreamFetch* fetch = nullptr;  // of bias to come
};

// The state of 32 queries whose exponentials are being taken.
struct ExpState {
  ScoreFactors factors;  // those of scores times log2(e)
  float* sum;            // added to
  int64_t term_bytes;
};

// Elements of a row pair: [row][query half].
struct RowPairVectors {
  __m512 x[2][2];
};

// The first half of the work on a row pair of S, up to what is taken the
// exponential of. kBias: S holds the scores; kAlibi, kSoftcap: their option is
// worked in here.
template <class Variant, FusedMode kMode>
HWY_INLINE void Exponents(const ExpState& state, const ExpBlock& b, int pair,
                          __m512 scale, __m512 max0, __m512 max1,
                          RowPairVectors& out) {
  const ScoreFactors& f = state.factors;
  const int row = 2 * pair;
  const uint8_t* s = b.s + row / 16 * 2 * kTileBytes + row % 16 * 64;
  for (int r = 0; r < 2; ++r) {
    for (int h = 0; h < 2; ++h) {
      const __m512 x = _mm512_load_ps(s + h * kTileBytes + r * 64);
      const __m512 max = h == 0 ? max0 : max1;
      if constexpr (kMode == FusedMode::kBias) {
        // (S - max) log2(e), see InLog2.
        out.x[r][h] = _mm512_fmsub_ps(_mm512_sub_ps(x, max), scale,
                                      _mm512_set1_ps(ExpOrigin<Variant>()));
      } else if constexpr (kMode == FusedMode::kSoftcap) {
        out.x[r][h] = _mm512_fmsub_ps(
            TanhOfSteps(_mm512_mul_ps(x, _mm512_set1_ps(f.into_steps))),
            _mm512_set1_ps(f.softcap), max);
      } else if constexpr (kMode == FusedMode::kAlibi) {
        // The distance to a row is that to the first, less or more; additions
        // are not held up by the tile unit.
        out.x[r][h] = _mm512_fmsub_ps(
            x, scale,
            _mm512_add_ps(max, _mm512_set1_ps(b.row_penalty[row + r])));
      } else {
        out.x[r][h] = _mm512_fmsub_ps(x, scale, max);
      }
    }
  }
}

// The second half: P = exp(score - max), its sums (without dropout), and P∘Z as
// right operand.
template <class Variant>
HWY_INLINE void ExpRowPair(const ExpState& state, const ExpBlock& b, int pair,
                           const RowPairVectors& exponents, __m512& sum0,
                           __m512& sum1) {
  constexpr int kTerms = Variant::kProbabilityTerms;
  const int row = 2 * pair;
  __m512 p00 = ProbabilityExp2<Variant>(exponents.x[0][0]);
  __m512 p01 = ProbabilityExp2<Variant>(exponents.x[0][1]);
  __m512 p10 = ProbabilityExp2<Variant>(exponents.x[1][0]);
  __m512 p11 = ProbabilityExp2<Variant>(exponents.x[1][1]);
  sum0 = _mm512_add_ps(sum0, _mm512_add_ps(p00, p10));
  sum1 = _mm512_add_ps(sum1, _mm512_add_ps(p01, p11));
  if (b.keep != nullptr) {
    const uint16_t* keep = b.keep + 2 * row;
    const __m512 kept = _mm512_set1_ps(state.factors.kept);
    p00 = _mm512_maskz_mul_ps(keep[0], p00, kept);
    p01 = _mm512_maskz_mul_ps(keep[1], p01, kept);
    p10 = _mm512_maskz_mul_ps(keep[2], p10, kept);
    p11 = _mm512_maskz_mul_ps(keep[3], p11, kept);
  }
  __m512i even[kTerms], odd[kTerms];
  SplitTerms<typename Variant::Tiles, kTerms, UpperBits>(p00, p01, even);
  SplitTerms<typename Variant::Tiles, kTerms, UpperBits>(p10, p11, odd);
  uint8_t* HWY_RESTRICT p = b.p + pair * 64;
  for (int t = 0; t < kTerms; ++t) {
    _mm512_store_si512(p + t * state.term_bytes,
                       _mm512_unpacklo_epi16(even[t], odd[t]));
    _mm512_store_si512(p + t * state.term_bytes + kTileBytes,
                       _mm512_unpackhi_epi16(even[t], odd[t]));
  }
}

// The exponentials of a sub-block, row pair by row pair in the order of
// kOrder::At(0) to kOrder::At(15).
template <class Variant, FusedMode kMode, class kOrder>
struct ExpRows {
  const ExpState& state;
  const ExpBlock& b;
  __m512 scale, max0, max1, sum0, sum1;

  HWY_INLINE void Begin() {
    scale = _mm512_set1_ps(b.scale);
    max0 = _mm512_loadu_ps(b.max);
    max1 = _mm512_loadu_ps(b.max + 16);
    sum0 = _mm512_loadu_ps(state.sum);
    sum1 = _mm512_loadu_ps(state.sum + 16);
  }
  HWY_INLINE void Take(int i) {
    if constexpr (kMode == FusedMode::kBias) {
      if (b.fetch != nullptr) b.fetch->Step();
    }
    RowPairVectors exponents;
    Exponents<Variant, kMode>(state, b, kOrder::At(i), scale, max0, max1,
                              exponents);
    ExpRowPair<Variant>(state, b, kOrder::At(i), exponents, sum0, sum1);
  }
  HWY_INLINE void End() const {
    _mm512_storeu_ps(state.sum, sum0);
    _mm512_storeu_ps(state.sum + 16, sum1);
  }
};

struct InOrder {
  static constexpr int At(int i) { return i; }
};

template <class Variant, FusedMode kMode>
HWY_NOINLINE void ExpAll(const ExpState& state, const ExpBlock& b) {
  ExpRows<Variant, kMode, InOrder> rows{state, b, {}, {}, {}, {}, {}};
  rows.Begin();
  for (int pair = 0; pair < 16; ++pair) rows.Take(pair);
  rows.End();
}

// S = K Q^T of a sub-block into the registers (stored by the next product),
// with the exponentials of `b` between the tile products unless kMode is kNone.
template <class Variant, int kSteps, FusedMode kMode>
struct ForwardScoreLoop {
  static constexpr bool kExp = kMode != FusedMode::kNone;
  using Tiles = typename Variant::Tiles;
  static constexpr int kTerms = Variant::kInputTerms;
  using Pairs = TermPairs<kTerms, kTerms, Variant::kScoreTermLimit>;
  static constexpr int kStepSlots = Pairs::kCount * 4;

  const uint8_t* k;
  const uint8_t* q;
  int64_t steps;
  const PendingTiles& pending;
  const ExpState& state;
  const ExpBlock& b;

  // The order of the row pairs. Four tiles of 1 KiB are stored meanwhile, one
  // in each of the first four slots, and cover a page: a load waits for a store
  // in flight whose low 12 address bits are its own. So the rows of the lower
  // tiles are read first, while the upper ones are stored.
  static constexpr int At(int row) {
    constexpr int kAhead = kSteps == 0 ? 0 : kSteps >= 8 ? 1 : 8 / (2 * kSteps);
    return row < kAhead ? 8 + row : row < 8 + kAhead ? row - kAhead : row;
  }

  using RowWork = ExpRows<Variant, kMode, ForwardScoreLoop>;

  template <int kOffset>
  HWY_INLINE void Rows(int64_t step, RowWork& r) const {
    if constexpr (kExp) {
      const int64_t slots = (kSteps > 0 ? kSteps : steps) * kStepSlots;
      const int64_t slot = step * kStepSlots + kOffset;
      for (int64_t row = slot * 16 / slots; row < (slot + 1) * 16 / slots;
           ++row) {
        r.Take(static_cast<int>(row));
      }
    }
  }

  template <int kPair>
  HWY_INLINE void Pair(int64_t step, RowWork& r) const {
    constexpr TermPair kTerm = Pairs::Get(kPair);
    const int64_t half = steps * kTileBytes;
    const uint8_t* a = k + 2 * kTerm.left * half + step * kTileBytes;
    const uint8_t* right = q + 2 * kTerm.right * half + step * kTileBytes;
    if constexpr (Pairs::LoadsLeft(kPair)) {
      Tiles::template LoadStreaming<4>(a, 64);
      Tiles::template LoadStreaming<5>(a + half, 64);
    }
    if constexpr (Pairs::LoadsRight(kPair)) {
      Tiles::template Load<6>(right, 64);
      Tiles::template Load<7>(right + half, 64);
    }
    if (kPair == 0 && step == 0) {
      Tiles::template Store<0>(pending.c);
      Tiles::template Zero<0>();
      Tiles::template Dot<0, 4, 6>();
      Rows<kPair * 4>(step, r);
      Tiles::template Store<1>(pending.c + pending.column);
      Tiles::template Zero<1>();
      Tiles::template Dot<1, 4, 7>();
      Rows<kPair * 4 + 1>(step, r);
      Tiles::template Store<2>(pending.c + pending.row);
      Tiles::template Zero<2>();
      Tiles::template Dot<2, 5, 6>();
      Rows<kPair * 4 + 2>(step, r);
      Tiles::template Store<3>(pending.c + pending.row + pending.column);
      Tiles::template Zero<3>();
      Tiles::template Dot<3, 5, 7>();
    } else {
      Tiles::template Dot<0, 4, 6>();
      Rows<kPair * 4>(step, r);
      Tiles::template Dot<1, 4, 7>();
      Rows<kPair * 4 + 1>(step, r);
      Tiles::template Dot<2, 5, 6>();
      Rows<kPair * 4 + 2>(step, r);
      Tiles::template Dot<3, 5, 7>();
    }
    Rows<kPair * 4 + 3>(step, r);
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

template <class Variant, int kSteps, FusedMode kMode>
HWY_NOINLINE void ForwardScoreStep(const uint8_t* k, const uint8_t* q,
                                   int64_t steps, const PendingTiles& c,
                                   PendingTiles& pending, const ExpState& state,
                                   const ExpBlock& b) {
  using Tiles = typename Variant::Tiles;
  if (kSteps == 0 && steps == 0) {
    // A head dim of 0: S = 0.
    StorePending<Tiles>(pending);
    Tiles::template Zero<0>();
    Tiles::template Zero<1>();
    Tiles::template Zero<2>();
    Tiles::template Zero<3>();
    if (kMode != FusedMode::kNone) ExpAll<Variant, kMode>(state, b);
  } else {
    ForwardScoreLoop<Variant, kSteps, kMode>{k, q, steps, pending, state, b}
        .Run();
  }
  pending = c;
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_SCORES_INL_H_
