// The score step of the backward pass on AMX: S and dP of a sub-block of 32
// keys x 32 queries, and the fused pass that turns them into P and dS, running
// one sub-block behind, a row pair at a time between single tile products, so
// that vector and tile units work at once.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_BACKWARD_SCORES_INL_H_
#define FA2_SRC_SIMD_AMX_BACKWARD_SCORES_INL_H_

#include "src/simd/amx_elements-inl.h"
#include "src/simd/amx_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

enum class FusedMode {
  kNone,     // nothing before this sub-block
  kPlain,    // P = exp(S - lse), dS = P (dP - delta)
  kMasked,   // the same with a range of visible keys for each query
  kGeneral,  // everything in ScoreOptions
};

// P and dS of a slab of keys as left operands: panels of kPanelTiles query
// tiles side by side. Rows of a tile are then kPanelTiles * 64 bytes apart, and
// the fused pass's stores move through the page at the pace of the tile loads
// of the same k step, a quarter page behind: a load whose low 12 address bits
// equal those of a store in flight waits for it (765 -> 600 cycles a
// sub-block at D = 128).
template <int kPanelTiles>
struct ScoreLayout {
  static constexpr int64_t kRow = kPanelTiles * 64;
  static constexpr int64_t kPairRow = kPanelTiles * 128;

  static int64_t Panels(int64_t query_panels) {
    return (query_panels + kPanelTiles - 1) / kPanelTiles;
  }
  // Offset of the 32 x 32 sub-block in a slab's P or dS.
  static HWY_INLINE int64_t Rows(int64_t key_panel, int64_t query_panel,
                                 int64_t panels) {
    return (key_panel * panels + query_panel / kPanelTiles) * 32 * kRow +
           query_panel % kPanelTiles * 64;
  }
  // Offset of the sub-block in a chunk's dS as right operand. The slot is
  // XORed with the key: rows are a power of two apart, and one slot down a
  // whole chunk would use a quarter of L1's sets.
  static HWY_INLINE int64_t Pairs(int64_t key_panel, int64_t query_panel,
                                  int64_t chunk_panels) {
    return (query_panel / kPanelTiles * chunk_panels + key_panel) * 16 *
               kPairRow +
           ((query_panel ^ key_panel) % kPanelTiles) * 128;
  }
};

// One sub-block in the fused pass.
struct FusedBlock {
  const uint8_t* s[2][2];   // tiles [key half][query half]
  const uint8_t* dp[2][2];  // start at -delta
  uint8_t* p;               // first term, as left operand
  uint8_t* ds;
  uint8_t* ds_pairs;  // as right operand
  const float* lse2;  // lse * log2(e)
  // Visible rows of each query, by key half: [begin, end).
  const float* begin[2];
  const float* end[2];
  int64_t key;  // first row of the block
  int64_t query;
};

// What is the same for all sub-blocks of a block.
struct FusedContext {
  float scale_log2e = 0.0f;
  int64_t p_term = 0;  // bytes between terms
  int64_t ds_term = 0;
  int64_t pairs_term = 0;
  const float* late_delta = nullptr;  // -delta where tiles do not start at it
  const BackwardBlock* block = nullptr;
};

template <class Variant, int kPanelTiles>
HWY_INLINE void StoreRowPair(const FusedContext& c, const FusedBlock& b,
                             int row, __m512 p00, __m512 p01, __m512 p10,
                             __m512 p11, __m512 s00, __m512 s01, __m512 s10,
                             __m512 s11) {
  using Layout = ScoreLayout<kPanelTiles>;
  using Tiles = typename Variant::Tiles;
  uint8_t* HWY_RESTRICT p = b.p + row * Layout::kRow;
  uint8_t* HWY_RESTRICT ds = b.ds + row * Layout::kRow;
  uint8_t* HWY_RESTRICT pairs = b.ds_pairs + row / 2 * Layout::kPairRow;
  constexpr int kP = Variant::kProbabilityTerms;
  constexpr int kDs = Variant::kGradientTerms;
  __m512i p_even[kP], p_odd[kP], even[kDs], odd[kDs];
  SplitTerms<Tiles, kP>(p00, p01, p_even);
  SplitTerms<Tiles, kP>(p10, p11, p_odd);
  for (int t = 0; t < kP; ++t) {
    _mm512_store_si512(p + t * c.p_term, p_even[t]);
    _mm512_store_si512(p + t * c.p_term + Layout::kRow, p_odd[t]);
  }
  SplitTerms<Tiles, kDs>(s00, s01, even);
  SplitTerms<Tiles, kDs>(s10, s11, odd);
  for (int t = 0; t < kDs; ++t) {
    _mm512_store_si512(ds + t * c.ds_term, even[t]);
    _mm512_store_si512(ds + t * c.ds_term + Layout::kRow, odd[t]);
    _mm512_store_si512(pairs + t * c.pairs_term,
                       _mm512_unpacklo_epi16(even[t], odd[t]));
    _mm512_store_si512(pairs + t * c.pairs_term + 64,
                       _mm512_unpackhi_epi16(even[t], odd[t]));
  }
}

// P and dS of 16 elements. Masked elements are 0 whatever S and dP are.
template <class Variant, bool kMasked>
HWY_INLINE void FuseVector(const uint8_t* s, const uint8_t* dp, __m512 scale,
                           __m512 lse2, __mmask16 visible, __m512& p,
                           __m512& ds) {
  p = Exp2<Variant::kExpDegree>(
      _mm512_fmsub_ps(_mm512_load_ps(s), scale, lse2));
  if (kMasked) {
    p = _mm512_maskz_mov_ps(visible, p);
    ds = _mm512_maskz_mul_ps(visible, p, _mm512_load_ps(dp));
  } else {
    ds = _mm512_mul_ps(p, _mm512_load_ps(dp));
  }
}

template <class Variant, int kPanelTiles, bool kMasked>
HWY_INLINE void FuseRowPair(const FusedContext& c, const FusedBlock& b,
                            int pair, __m512 scale, __m512 lse0, __m512 lse1) {
  const int row = 2 * pair;
  const int half = row / 16;
  const int64_t at = row % 16 * 64;
  const uint8_t* s0 = b.s[half][0] + at;
  const uint8_t* s1 = b.s[half][1] + at;
  const uint8_t* dp0 = b.dp[half][0] + at;
  const uint8_t* dp1 = b.dp[half][1] + at;
  __mmask16 m00 = 0, m01 = 0, m10 = 0, m11 = 0;
  if (kMasked) {
    const float* begin = b.begin[half];
    const float* end = b.end[half];
    m00 = VisibleQueries(begin, end, b.key + row);
    m01 = VisibleQueries(begin + 16, end + 16, b.key + row);
    m10 = VisibleQueries(begin, end, b.key + row + 1);
    m11 = VisibleQueries(begin + 16, end + 16, b.key + row + 1);
  }
  __m512 p00, p01, p10, p11, d00, d01, d10, d11;
  FuseVector<Variant, kMasked>(s0, dp0, scale, lse0, m00, p00, d00);
  FuseVector<Variant, kMasked>(s1, dp1, scale, lse1, m01, p01, d01);
  FuseVector<Variant, kMasked>(s0 + 64, dp0 + 64, scale, lse0, m10, p10, d10);
  FuseVector<Variant, kMasked>(s1 + 64, dp1 + 64, scale, lse1, m11, p11, d11);
  StoreRowPair<Variant, kPanelTiles>(c, b, row, p00, p01, p10, p11, d00, d01,
                                     d10, d11);
}

// Every option; a call of its own, so that the fast paths stay small.
template <class Variant, int kPanelTiles>
HWY_NOINLINE void FuseRowPairGeneral(const FusedContext& c, const FusedBlock& b,
                                     int pair) {
  const BackwardBlock& block = *c.block;
  const ScoreOptions& o = block.score;
  const int half = 2 * pair / 16;
  __m512 p[2][2], d[2][2];
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * pair + r;
    for (int h = 0; h < 2; ++h) {
      const int64_t query = b.query + 16 * h;
      const int64_t staged = StagedOffset(o, b.key + row, query);
      const ScoreElements e =
          GeneralScore(o, _mm512_load_ps(b.s[half][h] + row % 16 * 64),
                       VisibleQueries(b.begin[half] + 16 * h,
                                      b.end[half] + 16 * h, b.key + row),
                       b.key + row, query);
      const __m512 prob = _mm512_maskz_mov_ps(
          e.visible, Exp2<Variant::kExpDegree>(
                         _mm512_fmsub_ps(e.s, _mm512_set1_ps(1.44269504f),
                                         _mm512_loadu_ps(b.lse2 + 16 * h))));
      __m512 grad = _mm512_load_ps(b.dp[half][h] + row % 16 * 64);
      p[r][h] = prob;
      if (o.dropout != nullptr) {
        const __m512 z =
            _mm512_loadu_ps(static_cast<const float*>(o.dropout) + staged);
        p[r][h] = _mm512_mul_ps(prob, z);
        grad = _mm512_fmadd_ps(grad, z, _mm512_loadu_ps(c.late_delta + query));
      }
      grad = _mm512_maskz_mul_ps(e.visible, prob, grad);
      if (block.ds != nullptr) {
        _mm512_storeu_ps(static_cast<float*>(block.ds) + staged, grad);
      }
      if (block.alibi_gradient != nullptr) {
        *block.alibi_gradient -= static_cast<double>(
            _mm512_reduce_add_ps(_mm512_mul_ps(grad, e.distance)));
      }
      d[r][h] = _mm512_maskz_mul_ps(e.visible, grad, e.slope);
    }
  }
  StoreRowPair<Variant, kPanelTiles>(c, b, 2 * pair, p[0][0], p[0][1], p[1][0],
                                     p[1][1], d[0][0], d[0][1], d[1][0],
                                     d[1][1]);
}

template <class Variant, int kPanelTiles, FusedMode kMode>
HWY_INLINE void FuseRows(const FusedContext& c, const FusedBlock& b, int pair,
                         __m512 scale, __m512 lse0, __m512 lse1) {
  if (kMode == FusedMode::kGeneral) {
    FuseRowPairGeneral<Variant, kPanelTiles>(c, b, pair);
  } else {
    FuseRowPair<Variant, kPanelTiles, kMode == FusedMode::kMasked>(
        c, b, pair, scale, lse0, lse1);
  }
}

// The fused pass of a sub-block on its own, after the last of a slab.
template <class Variant, int kPanelTiles, FusedMode kMode>
HWY_NOINLINE void FuseAll(const FusedContext& c, const FusedBlock& b) {
  const __m512 scale = _mm512_set1_ps(c.scale_log2e);
  const __m512 lse0 = _mm512_loadu_ps(b.lse2);
  const __m512 lse1 = _mm512_loadu_ps(b.lse2 + 16);
  for (int pair = 0; pair < 16; ++pair) {
    FuseRows<Variant, kPanelTiles, kMode>(c, b, pair, scale, lse0, lse1);
  }
}

// Operands of the products of one sub-block; `*_half` is the distance between
// its two groups of 16 rows.
struct ScoreOperands {
  const uint8_t* k;
  const uint8_t* q;
  const uint8_t* v;
  const uint8_t* dout;
  int64_t qk_half;
  int64_t vo_half;
  const float* tile_start;  // of dP: -delta, 32 queries
  uint8_t* s[2][2];
  uint8_t* dp[2][2];  // where dP of the sub-block before goes
  int64_t steps_qk;   // head dim / 32
  int64_t steps_vo;
};

// The loop over the steps of both products, with the fused pass's row pairs in
// the slots after each tile product, as many as keep pace. kSteps is the head
// dim / 32 of both products, or 0 for any, read at run time.
template <class Variant, int kPanelTiles, FusedMode kMode, int kSteps>
struct ScoreLoop {
  using Tiles = typename Variant::Tiles;
  static constexpr int kTerms = Variant::kInputTerms;
  using Pairs = TermPairs<kTerms, kTerms, Variant::kTermLimit>;
  static constexpr int kStepSlots = Pairs::kCount * 4;
  // With 4 or 8 steps a product, the second product reads its quarter pages in
  // the order 2, 3, 0, 1, and the row pairs follow, so that stores of the last
  // steps of the first product are far from the first loads of the second.
  static constexpr int kSwap = kSteps > 0 && kSteps % 4 == 0 ? 2 : 0;

  const ScoreOperands& o;
  const FusedContext& c;
  const FusedBlock& fused;
  int64_t slots;  // of both products, when kSteps is 0

  static constexpr int RowPair(int row) {
    return kSwap == 0 || row < 8 ? row : row ^ (kSwap * 8 / kSteps);
  }

  template <int kFirst, int kLast>
  HWY_INLINE void RowRange(__m512 scale, __m512 lse0, __m512 lse1) const {
    if constexpr (kFirst < kLast) {
      FuseRows<Variant, kPanelTiles, kMode>(c, fused, RowPair(kFirst), scale,
                                            lse0, lse1);
      RowRange<kFirst + 1, kLast>(scale, lse0, lse1);
    }
  }

  // The rows due after slot base + kOffset, base being a Const or a number.
  template <int kOffset, class Base>
  HWY_INLINE void Rows(Base base, __m512 scale, __m512 lse0,
                       __m512 lse1) const {
    if constexpr (kMode == FusedMode::kNone) {
      return;
    } else if constexpr (kSteps > 0) {
      constexpr int kSlots = 2 * kSteps * kStepSlots;
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
  HWY_INLINE void Step(int64_t step, Base base, bool first, __m512 scale,
                       __m512 lse0, __m512 lse1) const {
    constexpr TermPair kTerm = Pairs::Get(kPair);
    const int64_t half = kProduct == 0 ? o.qk_half : o.vo_half;
    const uint8_t* a =
        (kProduct == 0 ? o.k : o.v) + (step * kTerms + kTerm.left) * kTileBytes;
    const uint8_t* b = (kProduct == 0 ? o.q : o.dout) +
                       (step * kTerms + kTerm.right) * kTileBytes;
    if constexpr (Pairs::LoadsLeft(kPair)) Tiles::template Load<4>(a, 64);
    if constexpr (Pairs::LoadsRight(kPair)) {
      Tiles::template LoadStreaming<6>(b, 64);
      Tiles::template LoadStreaming<7>(b + half, 64);
    }
    if constexpr (Pairs::LoadsLeft(kPair)) {
      Tiles::template Load<5>(a + half, 64);
    }
    if (kPair == 0 && first) {
      // The results of the product before leave between the first tile
      // products of this one, where the tile unit would wait for them.
      Start<kProduct, 0, 4, 6, 0, 0>();
      Start<kProduct, 1, 4, 7, 0, 1>();
      Start<kProduct, 2, 5, 6, 1, 0>();
      Start<kProduct, 3, 5, 7, 1, 1>();
      Rows<kPair * 4>(base, scale, lse0, lse1);
      Rows<kPair * 4 + 1>(base, scale, lse0, lse1);
      Rows<kPair * 4 + 2>(base, scale, lse0, lse1);
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

  template <int kProduct, int kC, int kA, int kB, int kKeyHalf, int kQueryHalf>
  HWY_INLINE void Start() const {
    Clear<kProduct, kC, kKeyHalf, kQueryHalf>();
    Tiles::template Dot<kC, kA, kB>();
  }

  // Stores what the product before left and gives this one its first value.
  template <int kProduct, int kC, int kKeyHalf, int kQueryHalf>
  HWY_INLINE void Clear() const {
    if constexpr (kProduct == 0) {
      Tiles::template Store<kC>(o.dp[kKeyHalf][kQueryHalf]);
      Tiles::template Zero<kC>();
    } else {
      Tiles::template Store<kC>(o.s[kKeyHalf][kQueryHalf]);
      Tiles::template Load<kC>(o.tile_start + 16 * kQueryHalf, 0);
    }
  }

  template <int kProduct, class Base, int... kPair>
  HWY_INLINE void StepPairs(int64_t step, Base base, bool first, __m512 scale,
                            __m512 lse0, __m512 lse1,
                            std::integer_sequence<int, kPair...>) const {
    (Step<kProduct, kPair>(step, base, first, scale, lse0, lse1), ...);
  }

  template <int kProduct, int... kStep>
  HWY_INLINE void FixedSteps(__m512 scale, __m512 lse0, __m512 lse1,
                             std::integer_sequence<int, kStep...>) const {
    (StepPairs<kProduct>(kProduct == 0 ? kStep : kStep ^ kSwap,
                         Const<(kProduct * kSteps + kStep) * kStepSlots>(),
                         kStep == 0, scale, lse0, lse1,
                         std::make_integer_sequence<int, Pairs::kCount>()),
     ...);
  }

  template <int kProduct>
  HWY_INLINE void RunProduct(__m512 scale, __m512 lse0, __m512 lse1) const {
    if constexpr (kSteps > 0) {
      FixedSteps<kProduct>(scale, lse0, lse1,
                           std::make_integer_sequence<int, kSteps>());
    } else {
      const int64_t steps = kProduct == 0 ? o.steps_qk : o.steps_vo;
      const int64_t before = kProduct == 0 ? 0 : o.steps_qk;
      if (steps == 0) {
        Clear<kProduct, 0, 0, 0>();
        Clear<kProduct, 1, 0, 1>();
        Clear<kProduct, 2, 1, 0>();
        Clear<kProduct, 3, 1, 1>();
      }
      for (int64_t step = 0; step < steps; ++step) {
        StepPairs<kProduct>(step, (before + step) * kStepSlots, step == 0,
                            scale, lse0, lse1,
                            std::make_integer_sequence<int, Pairs::kCount>());
      }
    }
  }
};

// S and dP of one sub-block; dP stays in tile registers 0-3, to be stored by
// the next call. `fused` is the sub-block before.
template <class Variant, int kPanelTiles, FusedMode kMode, int kSteps>
HWY_NOINLINE void ScoreStep(const ScoreOperands& o, const FusedContext& c,
                            const FusedBlock& fused) {
  using Loop = ScoreLoop<Variant, kPanelTiles, kMode, kSteps>;
  const Loop loop{o, c, fused, (o.steps_qk + o.steps_vo) * Loop::kStepSlots};
  __m512 scale = _mm512_setzero_ps(), lse0 = scale, lse1 = scale;
  if (kMode != FusedMode::kNone) {
    scale = _mm512_set1_ps(c.scale_log2e);
    lse0 = _mm512_loadu_ps(fused.lse2);
    lse1 = _mm512_loadu_ps(fused.lse2 + 16);
  }
  loop.template RunProduct<0>(scale, lse0, lse1);
  loop.template RunProduct<1>(scale, lse0, lse1);
  if (kMode != FusedMode::kNone && loop.slots == 0) {
    FuseAll<Variant, kPanelTiles, kMode>(c, fused);
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_BACKWARD_SCORES_INL_H_
