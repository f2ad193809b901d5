// SPDX-License-Identifier: Apache-2.0

// The fused pass of the backward pass on AMX: S and dP of a sub-block of 32
// keys x 32 queries become P and dS, as operands of the products that follow, a
// row pair at a time.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_BACKWARD_FUSED_PASS_INL_H_
#define FA2_SRC_SIMD_AMX_BACKWARD_FUSED_PASS_INL_H_

#include "src/simd/amx/elements-inl.h"
#include "src/simd/amx/products-inl.h"
#include "src/simd/amx/stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

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
  // Rows are a power of two apart, so that a column of tiles uses a fraction of
  // L1's sets. P, dS and dS as right operand of a sub-block, which are written
  // together, go to different sets: columns are XORed with a `turn`, the panel
  // of keys, and dS's with one more (D 64: 716 -> 696 cycles a sub-block, D
  // 128: 893 -> 844). With 8 columns, where a sub-block's operands alone fill
  // L1, that gained nothing.
  static constexpr int64_t kGradientTurn = 1;
  static HWY_INLINE int64_t Column(int64_t query_panel, int64_t turn) {
    return (kPanelTiles <= 4 ? query_panel ^ turn : query_panel) % kPanelTiles;
  }
  // Offset of a slab's panel of keys in P or dS.
  static HWY_INLINE int64_t KeyPanel(int64_t panel, int64_t panels) {
    return panel * panels * 32 * kRow;
  }
  // Offset of a 32 x 32 sub-block in such a panel.
  static HWY_INLINE int64_t Rows(int64_t query_panel, int64_t turn) {
    return query_panel / kPanelTiles * 32 * kRow +
           Column(query_panel, turn) * 64;
  }
  // Offset of the sub-block in a chunk's dS as right operand, whose columns are
  // twice as wide. One column down a chunk would use a fraction of the sets.
  static HWY_INLINE int64_t Pairs(int64_t key_panel, int64_t query_panel,
                                  int64_t chunk_panels) {
    const int64_t column = (query_panel ^ key_panel) % kPanelTiles;
    const int64_t slot =
        kPanelTiles == 4 ? (column / 2 ^ 1) + column % 2 * 2 : column;
    return (query_panel / kPanelTiles * chunk_panels + key_panel) * 16 *
               kPairRow +
           slot * 128;
  }
};

// One sub-block in the fused pass.
struct FusedBlock {
  const uint8_t* s[2][2];   // tiles [key half][query half]
  const uint8_t* dp[2][2];  // start at -delta
  uint8_t* p;               // first term, as left operand
  uint8_t* ds;
  uint8_t* ds_pairs;  // as right operand
  const float* lse;
  const float* lse2;        // lse * log2(e) + ExpOrigin, see FuseOptions
  const uint16_t* visible;  // bits, as VisibleBits gives them
  int64_t key;              // first row of the block
  int64_t query;
  // What modes with options take. Rows of 32 queries:
  const uint16_t* keep;  // bits, of dropout
  const float* bias;
  StreamFetch* fetch;  // of bias to come
  float* score_gradient;
  // Of the 32 queries:
  const float* position;     // less `key`
  const float* minus_delta;  // times 1 - p of dropout

  template <class Variant>
  HWY_INLINE const float* Lse(FusedMode mode) const {
    return InLog2<Variant>(mode) ? lse2 : lse;
  }
};

// What is the same for all sub-blocks of a block.
struct FusedContext {
  ScoreFactors log2;     // times log2(e)
  ScoreFactors natural;  // see InLog2
  int options = 0;       // for kGeneral
  int64_t p_term = 0;    // bytes between terms
  int64_t ds_term = 0;
  int64_t pairs_term = 0;
  double* slope_gradient = nullptr;

  template <class Variant>
  HWY_INLINE const ScoreFactors& Factors(FusedMode mode) const {
    return InLog2<Variant>(mode) ? log2 : natural;
  }
};

template <class Variant, int kPanelTiles>
HWY_INLINE void StoreRowPair(const FusedContext& c, const FusedBlock& b,
                             int row, Floats p00, Floats p01, Floats p10,
                             Floats p11, Floats s00, Floats s01, Floats s10,
                             Floats s11) {
  using Layout = ScoreLayout<kPanelTiles>;
  using Tiles = typename Variant::Tiles;
  uint8_t* HWY_RESTRICT p = b.p + row * Layout::kRow;
  uint8_t* HWY_RESTRICT ds = b.ds + row * Layout::kRow;
  uint8_t* HWY_RESTRICT pairs = b.ds_pairs + row / 2 * Layout::kPairRow;
  constexpr int kP = Variant::kProbabilityTerms;
  constexpr int kDs = Variant::kGradientTerms;
  Bf16s p_even[kP], p_odd[kP], even[kDs], odd[kDs];
  SplitTerms<Tiles, kP, UpperBits>(p00, p01, p_even);
  SplitTerms<Tiles, kP, UpperBits>(p10, p11, p_odd);
  for (int t = 0; t < kP; ++t) {
    StoreRow(p_even[t], p + t * c.p_term);
    StoreRow(p_odd[t], p + t * c.p_term + Layout::kRow);
  }
  SplitTerms<Tiles, kDs, UpperBits>(s00, s01, even);
  SplitTerms<Tiles, kDs, UpperBits>(s10, s11, odd);
  for (int t = 0; t < kDs; ++t) {
    StoreRow(even[t], ds + t * c.ds_term);
    StoreRow(odd[t], ds + t * c.ds_term + Layout::kRow);
    Bf16s low, high;
    InterleaveLanes(even[t], odd[t], low, high);
    StoreRow(low, pairs + t * c.pairs_term);
    StoreRow(high, pairs + t * c.pairs_term + 64);
  }
}

// P and dS of 16 elements. Masked elements are 0 whatever S and dP are.
template <class Variant, bool kMasked>
HWY_INLINE void FuseVector(const uint8_t* s, const uint8_t* dp, Floats scale,
                           Floats lse, FloatMask visible, Floats& p,
                           Floats& ds) {
  Floats x = hn::MulSub(LoadRow(s), scale, lse);
  if (!InLog2<Variant>(FusedMode::kPlain)) {
    x = IntoLog2<Variant>(x);
  }
  p = ProbabilityExp2<Variant>(x);
  if (kMasked) {
    p = hn::IfThenElseZero(visible, p);
    ds = hn::IfThenElseZero(visible, hn::Mul(p, LoadRow(dp)));
  } else {
    ds = hn::Mul(p, LoadRow(dp));
  }
}

template <class Variant, int kPanelTiles, bool kMasked>
HWY_INLINE void FuseRowPair(const FusedContext& c, const FusedBlock& b,
                            int pair, Floats scale, Floats lse0, Floats lse1) {
  const int row = 2 * pair;
  const int half = row / 16;
  const int64_t at = row % 16 * 64;
  const uint8_t* s0 = b.s[half][0] + at;
  const uint8_t* s1 = b.s[half][1] + at;
  const uint8_t* dp0 = b.dp[half][0] + at;
  const uint8_t* dp1 = b.dp[half][1] + at;
  const auto visible = [&b, row](int i) HWY_ATTR {
    return FloatMaskOf(kMasked ? b.visible[2 * row + i] : 0);
  };
  Floats p00, p01, p10, p11, d00, d01, d10, d11;
  FuseVector<Variant, kMasked>(s0, dp0, scale, lse0, visible(0), p00, d00);
  FuseVector<Variant, kMasked>(s1, dp1, scale, lse1, visible(1), p01, d01);
  FuseVector<Variant, kMasked>(s0 + 64, dp0 + 64, scale, lse0, visible(2), p10,
                               d10);
  FuseVector<Variant, kMasked>(s1 + 64, dp1 + 64, scale, lse1, visible(3), p11,
                               d11);
  StoreRowPair<Variant, kPanelTiles>(c, b, row, p00, p01, p10, p11, d00, d01,
                                     d10, d11);
}

// P and dS of 16 elements of row `row`, with options. Dropout multiplies what
// it keeps: P is that much greater, and delta less, so that dS needs no more.
template <class Variant, FusedMode kMode>
HWY_INLINE void FuseOptions(const FusedContext& c, const FusedBlock& b, int row,
                            int query_half, Floats scale, Floats lse, Floats& p,
                            Floats& ds) {
  const FloatTag d;
  const int column = 16 * query_half;
  const int64_t tile_row = row % 16 * 64;
  const ScoreFactors& factors = c.Factors<Variant>(kMode);
  FloatMask visible = FloatMaskOf(b.visible[2 * row + query_half]);
  ScoreSlopes slopes;
  Floats x = Score<kMode, Variant::kFast, true>(
      factors, c.options, LoadRow(b.s[row / 16][query_half] + tile_row), scale,
      lse, b.bias + 32 * row + column, b.position + column, row, visible,
      slopes);
  if (!InLog2<Variant>(kMode)) x = IntoLog2<Variant>(x);
  p = ProbabilityExp2<Variant>(x, visible);
  Floats grad = LoadRow(b.dp[row / 16][query_half] + tile_row);
  Floats dropped = p;
  if (Has<kMode>(kHasDropout, c.options)) {
    // dP of what is dropped is 0 before delta is subtracted.
    const FloatMask keep = FloatMaskOf(b.keep[2 * row + query_half]);
    if (!InLog2<Variant>(kMode)) {
      p = hn::Mul(p, hn::Set(d, factors.kept));
    }
    grad = hn::IfThenElse(keep, grad, hn::LoadU(d, b.minus_delta + column));
    dropped = hn::IfThenElseZero(keep, p);
  }
  ds = hn::IfThenElseZero(visible, hn::Mul(p, grad));
  p = dropped;
  if (Has<kMode>(kGivesScoreGradient, c.options)) {
    hn::StoreU(ds, d, b.score_gradient + 32 * row + column);
  }
  if (Has<kMode>(kGivesSlopeGradient, c.options)) {
    *c.slope_gradient -= static_cast<double>(
        hn::GetLane(hn::SumOfLanes(d, hn::Mul(ds, slopes.distance))));
  }
  if (Has<kMode>(kHasSoftcap, c.options)) {
    ds = hn::IfThenElseZero(visible, hn::Mul(ds, slopes.softcap));
  }
}

template <class Variant, int kPanelTiles, FusedMode kMode>
HWY_INLINE void FuseOptionsRowPair(const FusedContext& c, const FusedBlock& b,
                                   int pair, Floats scale, Floats lse0,
                                   Floats lse1) {
  const int row = 2 * pair;
  if (kMode == FusedMode::kGeneral && (c.options & kHasBias) != 0) {
    b.fetch->Step();
  }
  Floats p00, p01, p10, p11, d00, d01, d10, d11;
  FuseOptions<Variant, kMode>(c, b, row, 0, scale, lse0, p00, d00);
  FuseOptions<Variant, kMode>(c, b, row, 1, scale, lse1, p01, d01);
  FuseOptions<Variant, kMode>(c, b, row + 1, 0, scale, lse0, p10, d10);
  FuseOptions<Variant, kMode>(c, b, row + 1, 1, scale, lse1, p11, d11);
  StoreRowPair<Variant, kPanelTiles>(c, b, row, p00, p01, p10, p11, d00, d01,
                                     d10, d11);
}

// A call of its own, since all options together are long.
template <class Variant, int kPanelTiles>
HWY_NOINLINE void FuseRowPairGeneral(const FusedContext& c, const FusedBlock& b,
                                     int pair) {
  constexpr FusedMode kMode = FusedMode::kGeneral;
  const FloatTag d;
  FuseOptionsRowPair<Variant, kPanelTiles, kMode>(
      c, b, pair, hn::Set(d, c.Factors<Variant>(kMode).scale),
      hn::LoadU(d, b.Lse<Variant>(kMode)),
      hn::LoadU(d, b.Lse<Variant>(kMode) + 16));
}

template <class Variant, int kPanelTiles, FusedMode kMode>
HWY_INLINE void FuseRows(const FusedContext& c, const FusedBlock& b, int pair,
                         Floats scale, Floats lse0, Floats lse1) {
  if constexpr (kMode == FusedMode::kGeneral) {
    FuseRowPairGeneral<Variant, kPanelTiles>(c, b, pair);
  } else if constexpr (OptionsOf(kMode) != 0) {
    FuseOptionsRowPair<Variant, kPanelTiles, kMode>(c, b, pair, scale, lse0,
                                                    lse1);
  } else {
    FuseRowPair<Variant, kPanelTiles, kMode == FusedMode::kMasked>(
        c, b, pair, scale, lse0, lse1);
  }
}

// The fused pass of a sub-block on its own, after the last of a slab.
template <class Variant, int kPanelTiles, FusedMode kMode>
HWY_NOINLINE void FuseAll(const FusedContext& c, const FusedBlock& b) {
  const FloatTag d;
  const Floats scale = hn::Set(d, c.Factors<Variant>(kMode).scale);
  const Floats lse0 = hn::LoadU(d, b.Lse<Variant>(kMode));
  const Floats lse1 = hn::LoadU(d, b.Lse<Variant>(kMode) + 16);
  for (int pair = 0; pair < 16; ++pair) {
    FuseRows<Variant, kPanelTiles, kMode>(c, b, pair, scale, lse0, lse1);
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_BACKWARD_FUSED_PASS_INL_H_
