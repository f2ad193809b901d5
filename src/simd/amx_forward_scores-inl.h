// The score step of the forward pass on AMX: S of a sub-block of 32 keys x 32
// queries by tile products, between which the exponentials of a sub-block of
// the strip before are taken, a row pair at a time; and the pass over a strip
// that masks, transforms and finds the row maxima.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_SCORES_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_SCORES_INL_H_

#include "src/simd/amx_elements-inl.h"
#include "src/simd/amx_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// One sub-block whose exponentials are due.
struct ExpBlock {
  const uint8_t* s = nullptr;  // tiles [key half][query half]
  uint8_t* p = nullptr;  // first term, as right operand: [query half] tiles
  const uint16_t* keep = nullptr;  // of dropout, bits of 32 queries a key
};

// The state of 32 queries whose exponentials are being taken.
struct ExpState {
  float scale;
  float kept;        // 1 / (1 - p) of dropout
  const float* max;  // in the unit of S scale
  float* sum;        // added to
  int64_t term_bytes;
};

// One row pair: P = exp2(S scale - max), its sums (without dropout), and P∘Z as
// right operand. kNatural: P = exp(S - max), where (S - max) log2(e) must not
// meet an S log2(e) that is infinite, see InLog2.
template <class Variant, bool kNatural>
HWY_INLINE void ExpRowPair(const ExpState& state, const ExpBlock& b, int pair,
                           __m512 scale, __m512 max0, __m512 max1, __m512& sum0,
                           __m512& sum1) {
  constexpr int kTerms = Variant::kProbabilityTerms;
  const int row = 2 * pair;
  const uint8_t* s = b.s + row / 16 * 2 * kTileBytes + row % 16 * 64;
  const auto exp = [](const uint8_t* at, __m512 factor, __m512 max) HWY_ATTR {
    const __m512 x = _mm512_load_ps(at);
    return Exp2<Variant::kExpDegree>(
        kNatural ? _mm512_mul_ps(_mm512_sub_ps(x, max), factor)
                 : _mm512_fmsub_ps(x, factor, max));
  };
  __m512 p00 = exp(s, scale, max0);
  __m512 p01 = exp(s + kTileBytes, scale, max1);
  __m512 p10 = exp(s + 64, scale, max0);
  __m512 p11 = exp(s + kTileBytes + 64, scale, max1);
  sum0 = _mm512_add_ps(sum0, _mm512_add_ps(p00, p10));
  sum1 = _mm512_add_ps(sum1, _mm512_add_ps(p01, p11));
  if (b.keep != nullptr) {
    const uint16_t* keep = b.keep + 2 * row;
    const __m512 kept = _mm512_set1_ps(state.kept);
    p00 = _mm512_maskz_mul_ps(keep[0], p00, kept);
    p01 = _mm512_maskz_mul_ps(keep[1], p01, kept);
    p10 = _mm512_maskz_mul_ps(keep[2], p10, kept);
    p11 = _mm512_maskz_mul_ps(keep[3], p11, kept);
  }
  __m512i even[kTerms], odd[kTerms];
  SplitScores<typename Variant::Tiles, kTerms>(p00, p01, even);
  SplitScores<typename Variant::Tiles, kTerms>(p10, p11, odd);
  uint8_t* HWY_RESTRICT p = b.p + pair * 64;
  for (int t = 0; t < kTerms; ++t) {
    _mm512_store_si512(p + t * state.term_bytes,
                       _mm512_unpacklo_epi16(even[t], odd[t]));
    _mm512_store_si512(p + t * state.term_bytes + kTileBytes,
                       _mm512_unpackhi_epi16(even[t], odd[t]));
  }
}

template <class Variant, bool kNatural>
HWY_NOINLINE void ExpAll(const ExpState& state, const ExpBlock& b) {
  const __m512 scale = _mm512_set1_ps(state.scale);
  const __m512 max0 = _mm512_loadu_ps(state.max);
  const __m512 max1 = _mm512_loadu_ps(state.max + 16);
  __m512 sum0 = _mm512_loadu_ps(state.sum);
  __m512 sum1 = _mm512_loadu_ps(state.sum + 16);
  for (int pair = 0; pair < 16; ++pair) {
    ExpRowPair<Variant, kNatural>(state, b, pair, scale, max0, max1, sum0,
                                  sum1);
  }
  _mm512_storeu_ps(state.sum, sum0);
  _mm512_storeu_ps(state.sum + 16, sum1);
}

// S = K Q^T of a sub-block into the registers (stored by the next product),
// with the exponentials of `b` between the tile products unless b.s is nullptr.
template <class Variant, int kSteps, bool kExp, bool kNatural>
struct ForwardScoreLoop {
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
  static constexpr int RowPair(int row) {
    constexpr int kAhead = kSteps == 0 ? 0 : kSteps >= 8 ? 1 : 8 / (2 * kSteps);
    return row < kAhead ? 8 + row : row < 8 + kAhead ? row - kAhead : row;
  }

  template <int kOffset>
  HWY_INLINE void Rows(int64_t step, __m512 scale, __m512 max0, __m512 max1,
                       __m512& sum0, __m512& sum1) const {
    if constexpr (kExp) {
      const int64_t slots = (kSteps > 0 ? kSteps : steps) * kStepSlots;
      const int64_t slot = step * kStepSlots + kOffset;
      for (int64_t row = slot * 16 / slots; row < (slot + 1) * 16 / slots;
           ++row) {
        ExpRowPair<Variant, kNatural>(state, b, RowPair(static_cast<int>(row)),
                                      scale, max0, max1, sum0, sum1);
      }
    }
  }

  template <int kPair>
  HWY_INLINE void Pair(int64_t step, __m512 scale, __m512 max0, __m512 max1,
                       __m512& sum0, __m512& sum1) const {
    constexpr TermPair kTerm = Pairs::Get(kPair);
    const int64_t half = steps * kTileBytes;
    const uint8_t* a = k + 2 * kTerm.left * half + step * kTileBytes;
    const uint8_t* r = q + 2 * kTerm.right * half + step * kTileBytes;
    if constexpr (Pairs::LoadsLeft(kPair)) {
      Tiles::template LoadStreaming<4>(a, 64);
      Tiles::template LoadStreaming<5>(a + half, 64);
    }
    if constexpr (Pairs::LoadsRight(kPair)) {
      Tiles::template Load<6>(r, 64);
      Tiles::template Load<7>(r + half, 64);
    }
    if (kPair == 0 && step == 0) {
      Tiles::template Store<0>(pending.c);
      Tiles::template Zero<0>();
      Tiles::template Dot<0, 4, 6>();
      Rows<kPair * 4>(step, scale, max0, max1, sum0, sum1);
      Tiles::template Store<1>(pending.c + pending.column);
      Tiles::template Zero<1>();
      Tiles::template Dot<1, 4, 7>();
      Rows<kPair * 4 + 1>(step, scale, max0, max1, sum0, sum1);
      Tiles::template Store<2>(pending.c + pending.row);
      Tiles::template Zero<2>();
      Tiles::template Dot<2, 5, 6>();
      Rows<kPair * 4 + 2>(step, scale, max0, max1, sum0, sum1);
      Tiles::template Store<3>(pending.c + pending.row + pending.column);
      Tiles::template Zero<3>();
      Tiles::template Dot<3, 5, 7>();
    } else {
      Tiles::template Dot<0, 4, 6>();
      Rows<kPair * 4>(step, scale, max0, max1, sum0, sum1);
      Tiles::template Dot<1, 4, 7>();
      Rows<kPair * 4 + 1>(step, scale, max0, max1, sum0, sum1);
      Tiles::template Dot<2, 5, 6>();
      Rows<kPair * 4 + 2>(step, scale, max0, max1, sum0, sum1);
      Tiles::template Dot<3, 5, 7>();
    }
    Rows<kPair * 4 + 3>(step, scale, max0, max1, sum0, sum1);
  }

  template <int... kPair>
  HWY_INLINE void Step(int64_t step, __m512 scale, __m512 max0, __m512 max1,
                       __m512& sum0, __m512& sum1,
                       std::integer_sequence<int, kPair...>) const {
    (Pair<kPair>(step, scale, max0, max1, sum0, sum1), ...);
  }

  template <int... kStep>
  HWY_INLINE void FixedSteps(__m512 scale, __m512 max0, __m512 max1,
                             __m512& sum0, __m512& sum1,
                             std::integer_sequence<int, kStep...>) const {
    (Step(kStep, scale, max0, max1, sum0, sum1,
          std::make_integer_sequence<int, Pairs::kCount>()),
     ...);
  }

  HWY_INLINE void Run() const {
    __m512 scale = _mm512_setzero_ps(), max0 = scale, max1 = scale;
    __m512 sum0 = scale, sum1 = scale;
    if constexpr (kExp) {
      scale = _mm512_set1_ps(state.scale);
      max0 = _mm512_loadu_ps(state.max);
      max1 = _mm512_loadu_ps(state.max + 16);
      sum0 = _mm512_loadu_ps(state.sum);
      sum1 = _mm512_loadu_ps(state.sum + 16);
    }
    if constexpr (kSteps > 0) {
      FixedSteps(scale, max0, max1, sum0, sum1,
                 std::make_integer_sequence<int, kSteps>());
    } else {
      for (int64_t step = 0; step < steps; ++step) {
        Step(step, scale, max0, max1, sum0, sum1,
             std::make_integer_sequence<int, Pairs::kCount>());
      }
    }
    if constexpr (kExp) {
      _mm512_storeu_ps(state.sum, sum0);
      _mm512_storeu_ps(state.sum + 16, sum1);
    }
  }
};

template <class Variant, int kSteps, bool kNatural>
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
    if (b.s != nullptr) ExpAll<Variant, kNatural>(state, b);
  } else if (b.s != nullptr) {
    ForwardScoreLoop<Variant, kSteps, true, kNatural>{k,       q,     steps,
                                                      pending, state, b}
        .Run();
  } else {
    ForwardScoreLoop<Variant, kSteps, false, false>{k,       q,     steps,
                                                    pending, state, b}
        .Run();
  }
  pending = c;
}

// Maxima of the 32 columns of a sub-block: max[0..1] of columns 0-15, max[2..3]
// of columns 16-31. Two chains a column, since vmaxps takes 4 cycles and two
// start in each.
HWY_INLINE void ColumnMaxima(const uint8_t* s, __m512 (&max)[4]) {
  for (int row = 0; row < 16; ++row) {
    for (int half = 0; half < 2; ++half) {
      const uint8_t* t = s + half * 2 * kTileBytes + 64 * row;
      // The second operand is returned when the first is NaN: a NaN reaches P,
      // but not the maximum.
      max[half] = _mm512_max_ps(_mm512_load_ps(t), max[half]);
      max[2 + half] =
          _mm512_max_ps(_mm512_load_ps(t + kTileBytes), max[2 + half]);
    }
  }
}

// A sub-block of S that is to be transformed.
struct TransformBlock {
  uint8_t* s;
  // [key half] ranges of 32 queries, read where kPartial.
  const float* begin[2];
  const float* end[2];
  int64_t key;  // first row of the block
  const float* bias;
  float position[32];  // of the queries, less `key`
};

// Replaces S by the score with softcap, bias and ALiBi where there are any,
// hides what the queries do not see, and takes the maxima as ColumnMaxima does.
template <class Variant, FusedMode kMode, bool kPartial>
HWY_NOINLINE void TransformScores(const ScoreFactors& factors, int given,
                                  const TransformBlock& b, __m512 (&max)[4]) {
  const __m512 scale = _mm512_set1_ps(factors.scale);
  for (int tile_row = 0; tile_row < 16; ++tile_row) {
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * half + tile_row;
      for (int h = 0; h < 2; ++h) {
        uint8_t* at = b.s + (2 * half + h) * kTileBytes + tile_row * 64;
        __m512 x = _mm512_load_ps(at);
        __mmask16 visible = 0xFFFF;
        if (kPartial) {
          visible = VisibleQueries(b.begin[half] + 16 * h, b.end[half] + 16 * h,
                                   b.key + row);
        }
        if constexpr (kMode != FusedMode::kMasked) {
          ScoreSlopes slopes;
          x = Score<kMode, Variant::kFast, false>(
              factors, given, x, scale, scale, b.bias + 32 * row + 16 * h,
              b.position + 16 * h, row, visible, slopes);
        }
        if (kPartial || (OptionsOf(kMode) & kHasBias) != 0) {
          x = _mm512_mask_mov_ps(_mm512_set1_ps(-HUGE_VALF), visible, x);
        }
        _mm512_store_ps(at, x);
        max[2 * h + half] = _mm512_max_ps(x, max[2 * h + half]);
      }
    }
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_SCORES_INL_H_
