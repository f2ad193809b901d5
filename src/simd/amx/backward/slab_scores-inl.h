// SPDX-License-Identifier: Apache-2.0

// The scores of a slab in the backward pass on AMX: for each sub-block of 32
// keys x 32 queries S, dP and the fused pass, one behind another, with what
// their options need.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_BACKWARD_SLAB_SCORES_INL_H_
#define FA2_SRC_SIMD_AMX_BACKWARD_SLAB_SCORES_INL_H_

#include <type_traits>

#include "src/simd/amx/backward/scores-inl.h"
#include "src/simd/amx/backward/scratch-inl.h"
#include "src/simd/amx/bias-inl.h"
#include "src/simd/amx/visible_bits-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

template <class Variant, int kSteps>
class SlabScores {
  using Tiles = typename Variant::Tiles;
  static constexpr int kIn = Variant::kInputTerms;

 public:
  // Panels as wide as the head dim has steps, see ScoreLayout.
  static constexpr int kPanelTiles = kSteps == 0   ? 4
                                     : kSteps <= 2 ? 2
                                     : kSteps <= 4 ? 4
                                                   : 8;
  using Layout = ScoreLayout<kPanelTiles>;

  // `chunk` in panels. `dropout` has drawn the bits of a slab that is run;
  // `fetch` goes on with what it has begun to prefetch.
  SlabScores(const BackwardBlock& block, const BackwardScratch& scratch,
             int64_t chunk, const SlabDropout& dropout, StreamFetch& fetch)
      : b_(block),
        s_(scratch),
        queries_(block.queries / 32),
        dt_(amx::DepthTiles(block.head_dim)),
        vt_(amx::DepthTiles(block.value_dim)),
        chunk_(chunk),
        panels_(Layout::Panels(queries_)),
        dropout_(dropout),
        fetch_(fetch),
        bias_(block.score) {
    const ScoreOptions& o = b_.score;
    c_.log2 = ScoreFactors(o, kLog2E<double>);
    c_.natural = ScoreFactors(o, 1.0);
    c_.options = GivenOptions(o) | (GivesScores() ? kGivesScoreGradient : 0) |
                 (b_.alibi_gradient != nullptr ? kGivesSlopeGradient : 0);
    for (int64_t query = 0; query < queries_; ++query) {
      if (HasLargeScores(static_cast<const float*>(b_.lse) + 32 * query,
                         1.0f)) {
        c_.options |= kRoundsScores;
      }
    }
    c_.p_term = c_.ds_term = s_.slab_bytes;
    c_.pairs_term = s_.chunk_bytes;
    c_.slope_gradient = b_.alibi_gradient;
  }

  // P and dS of keys [slab, slab_end), panels of the chunk from `chunk` on.
  // Instances for options are for the fast variant and the usual head dims.
  void Run(int64_t chunk, int64_t slab, int64_t slab_end) {
    const FusedMode mode = ModeOf(c_.options);
    if (mode == FusedMode::kPlain) {
      return Scores<FusedMode::kPlain>(chunk, slab, slab_end);
    }
    if constexpr (kSteps > 0 && Variant::kProbabilityTerms == 1) {
      switch (mode) {
        case FusedMode::kBias:
          return Scores<FusedMode::kBias>(chunk, slab, slab_end);
        case FusedMode::kBiasGradient:
          return Scores<FusedMode::kBiasGradient>(chunk, slab, slab_end);
        case FusedMode::kAlibi:
          return Scores<FusedMode::kAlibi>(chunk, slab, slab_end);
        case FusedMode::kSoftcap:
          return Scores<FusedMode::kSoftcap>(chunk, slab, slab_end);
        case FusedMode::kDropout:
          return Scores<FusedMode::kDropout>(chunk, slab, slab_end);
        default:
          break;
      }
    }
    Scores<FusedMode::kGeneral>(chunk, slab, slab_end);
  }

 private:
  // Every other sub-block begins with dP, so that V and K are read twice in a
  // row: with 8 steps the two alone fill L1, and bf16 gains 1.5%, f16 2%. With
  // fewer it makes no difference.
  static constexpr bool kTakesTurns = kSteps == 8 && kIn <= 2;
  // Whether both products have as many steps, so that half of the fused pass
  // goes with each.
  static constexpr bool kEvenHalves = kSteps > 0 && !(kTakesTurns && kIn > 1);

  bool GivesScores() const { return b_.ds != nullptr || b_.ds_stream.given(); }

  // Where the fused pass of a sub-block reads and writes.
  void Place(int64_t chunk, int64_t slab, int64_t key, int64_t query,
             FusedBlock& f) const {
    const int64_t panel = Layout::KeyPanel(key - slab, panels_);
    f.p = s_.p + panel + Layout::Rows(query, key);
    f.ds = s_.ds + panel + Layout::Rows(query, key ^ Layout::kGradientTurn);
    f.ds_pairs = s_.pairs + Layout::Pairs(key - chunk, query, chunk_);
    f.lse2 = s_.lse2 + 32 * query;
    f.lse = static_cast<const float*>(b_.lse) + 32 * query;
    f.key = 32 * key;
    f.query = 32 * query;
  }

  // The same for modes with options.
  void PlaceOptions(int64_t slab, int64_t key, int64_t query, bool started,
                    FusedBlock& f) {
    const ScoreOptions& o = b_.score;
    const int64_t row = StagedRow(o, key, query);
    f.fetch = &fetch_;
    if (o.bias_stream.given() && !started) {
      f.bias = s_.bias;
      TakePart(o.bias_stream, key, query, s_.bias);
    } else if (o.bias != nullptr) {
      f.bias = static_cast<const float*>(o.bias) + 32 * row;
    }
    if (dropout_.given()) {
      f.keep = dropout_.Panel(query) + 64 * (key - slab);
    } else if (o.dropout != nullptr) {
      f.keep = static_cast<const uint16_t*>(o.dropout) + 2 * row;
    }
    if (b_.ds_stream.given()) {
      f.score_gradient = s_.score_gradient;
    } else if (b_.ds != nullptr) {
      f.score_gradient = static_cast<float*>(b_.ds) + 32 * row;
    }
    f.minus_delta = s_.minus_delta + 32 * query;
    f.position = s_.position;
    for (int i = 0; o.query_position != nullptr && i < 32; ++i) {
      s_.position[i] =
          static_cast<const float*>(o.query_position)[32 * query + i] -
          static_cast<float>(32 * key);
    }
  }

  // Hidden sub-blocks that a product may pass through, and their dS output.
  void Clear(int64_t chunk, int64_t slab, int64_t key, int64_t query) const {
    FusedBlock f;
    Place(chunk, slab, key, query, f);
    const Floats zero = hn::Zero(FloatTag());
    for (int row = 0; row < 32; row += 2) {
      StoreRowPair<Variant, kPanelTiles>(c_, f, row, zero, zero, zero, zero,
                                         zero, zero, zero, zero);
    }
    if (!GivesScores()) return;
    float* out =
        b_.ds_stream.given()
            ? s_.score_gradient
            : static_cast<float*>(b_.ds) + StagedRow(b_.score, key, query) * 32;
    for (int i = 0; i < 32 * 32; i += 16) hn::StoreU(zero, FloatTag(), out + i);
    if (b_.ds_stream.given()) GivePart(b_.ds_stream, key, query, out);
  }

  // Modes in which S of a sub-block may start from its bias, so that the fused
  // pass is the plain one.
  static constexpr bool MayStart(FusedMode mode) {
    return mode == FusedMode::kBias || mode == FusedMode::kBiasGradient;
  }

  // What S of a sub-block starts from in such a mode: its bias, or 0. Whether
  // bias.
  bool Start(int64_t key, int64_t query, ScoreOperands& o) const {
    alignas(64) static const uint8_t zeros[64] = {};
    o.s_start = zeros;
    o.s_start_row = 0;
    if (!s_.sub_blocks.At(key, query).visible() || !bias_.Fits(key, query)) {
      return false;
    }
    // dS in f32 is left by the pass for it.
    if (GivesScores() &&
        (b_.ds != nullptr || !TakesPairs(b_.ds_stream, key, query))) {
      return false;
    }
    for (int64_t quarter = 0; quarter < 4; ++quarter) {
      if (!bias_.template Put<false>(key, query, quarter, s_.s_start)) {
        return false;
      }
    }
    o.s_start = s_.s_start;
    o.s_start_row = 64;
    return true;
  }

  // What some sub-blocks take instead of a mode: masked ones, those whose S has
  // started from bias.
  static constexpr FusedMode OtherMode(FusedMode mode) {
    return mode == FusedMode::kPlain ? FusedMode::kMasked
           : MayStart(mode)          ? FusedMode::kPlain
                                     : mode;
  }

  template <FusedMode kPlainMode>
  void Scores(int64_t chunk, int64_t slab, int64_t slab_end) {
    constexpr FusedMode kOtherMode = OtherMode(kPlainMode);
    // Queries outside where bias is read: its rows are in the same pages for
    // both panels of keys (D 64 +20%). Else keys: 1% faster.
    constexpr bool kByQuery = MayStart(kPlainMode);
    uint8_t* const t = s_.tiles;
    ScoreOperands o;
    FusedBlock fused = {};
    o.qk_half = dt_ * kTileBytes;
    o.vo_half = vt_ * kTileBytes;
    const int64_t qk_panel = 2 * kIn * o.qk_half,
                  vo_panel = 2 * kIn * o.vo_half;
    o.steps_qk = dt_;
    o.steps_vo = vt_;
    o.follow[0][0] = t;
    o.follow[0][1] = t + 3 * kTileBytes;
    o.follow[1][0] = t + 4 * kTileBytes;
    o.follow[1][1] = t + 7 * kTileBytes;
    FusedMode mode = FusedMode::kNone;
    bool parity = false;
    const int64_t outer = kByQuery ? queries_ : slab_end - slab;
    const int64_t inner = kByQuery ? slab_end - slab : queries_;
    for (int64_t i = 0; i < outer; ++i) {
      for (int64_t j = 0; j < inner; ++j) {
        const int64_t key = slab + (kByQuery ? j : i);
        const int64_t query = kByQuery ? i : j;
        const SubBlock& sub = s_.sub_blocks.At(key, query);
        if (sub.hidden()) {
          if (sub.between || GivesScores()) Clear(chunk, slab, key, query);
          continue;
        }
        o.k = static_cast<const uint8_t*>(b_.k_score) + key * qk_panel;
        o.v = static_cast<const uint8_t*>(b_.v_score) + key * vo_panel;
        o.q = static_cast<const uint8_t*>(b_.q_score) + query * qk_panel;
        o.dout = static_cast<const uint8_t*>(b_.dout_score) + query * vo_panel;
        o.tile_start = s_.minus_delta + 32 * query;
        // The upper halves of the leading product are still read when the next
        // ones arrive. Lower ones too, unless halves are even.
        o.lead[0][0] = t + (!kEvenHalves && parity ? 14 : 2) * kTileBytes;
        o.lead[0][1] = t + (!kEvenHalves && parity ? 13 : 1) * kTileBytes;
        o.lead[1][0] = t + (parity ? 10 : 6) * kTileBytes;
        o.lead[1][1] = t + (parity ? 9 : 5) * kTileBytes;
        bool started = false;
        if (MayStart(kPlainMode)) started = Start(key, query, o);
        const bool dp_leads = kTakesTurns && parity;
        parity = !parity;
        if (dp_leads) {
          // No second instance where S always leads.
          Advance<kPlainMode, kTakesTurns ? 1 : 0>(mode, o, fused);
        } else {
          Advance<kPlainMode, 0>(mode, o, fused);
        }
        if (mode != FusedMode::kNone) Give(mode, fused);
        for (int a = 0; a < 2; ++a) {
          for (int b = 0; b < 2; ++b) {
            fused.s[a][b] = (dp_leads ? o.follow : o.lead)[a][b];
            fused.dp[a][b] = (dp_leads ? o.lead : o.follow)[a][b];
          }
        }
        Place(chunk, slab, key, query, fused);
        fused.visible = s_.all_visible;
        if (!sub.visible()) {
          VisibleBits(sub, b_.score, key, query, s_.visible);
          fused.visible = s_.visible;
        }
        mode = kPlainMode;
        if (started || (kPlainMode == FusedMode::kPlain && !sub.visible())) {
          mode = kOtherMode;
        }
        if (kPlainMode != FusedMode::kPlain) {
          PlaceOptions(slab, key, query, started, fused);
        }
      }
    }
    if (mode == FusedMode::kNone) return;
    Tiles::template Store<0>(o.follow[0][0]);
    Tiles::template Store<1>(o.follow[0][1]);
    Tiles::template Store<2>(o.follow[1][0]);
    Tiles::template Store<3>(o.follow[1][1]);
    if (mode == kPlainMode) {
      FuseAll<Variant, kPanelTiles, kPlainMode>(c_, fused);
    } else {
      FuseAll<Variant, kPanelTiles, kOtherMode>(c_, fused);
    }
    Give(mode, fused);
    Tiles::Fence();
  }

  // What the fused pass has left for ds_stream.
  HWY_INLINE void Give(FusedMode mode, const FusedBlock& fused) const {
    if (!b_.ds_stream.given()) return;
    const int64_t key = fused.key / 32, query = fused.query / 32;
    if (mode == FusedMode::kPlain) {
      // S has started from bias.
      GivePairs(b_.ds_stream, key, query, fused.ds_pairs, Layout::kPairRow);
    } else {
      GivePart(b_.ds_stream, key, query, s_.score_gradient);
    }
  }

  template <FusedMode kPlainMode, int kLead>
  HWY_INLINE void Advance(FusedMode mode, const ScoreOperands& o,
                          const FusedBlock& fused) const {
    const auto step = [&](auto fused_mode) HWY_ATTR {
      ScoreStep<Variant, kPanelTiles, decltype(fused_mode)::value, kSteps,
                kLead, MayStart(kPlainMode)>(o, c_, fused);
    };
    if (mode == kPlainMode) {
      step(std::integral_constant<FusedMode, kPlainMode>());
    } else if (mode == FusedMode::kNone) {
      step(std::integral_constant<FusedMode, FusedMode::kNone>());
    } else {
      step(std::integral_constant<FusedMode, OtherMode(kPlainMode)>());
    }
  }

  const BackwardBlock& b_;
  const BackwardScratch& s_;
  const int64_t queries_;  // panels
  const int64_t dt_, vt_;
  const int64_t chunk_;   // panels
  const int64_t panels_;  // of query tiles in a slab
  const SlabDropout& dropout_;
  StreamFetch& fetch_;  // of bias_stream
  const BiasOfProducts bias_;
  FusedContext c_;
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_BACKWARD_SLAB_SCORES_INL_H_
