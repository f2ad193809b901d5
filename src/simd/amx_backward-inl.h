// The backward pass of a block on AMX.
//
//   for chunks of keys (ChunkPanels):
//     for slabs of 64 keys:
//       S, dP and the fused pass: P and dS of the slab
//       dV += P^T dO, dK += dS^T Q
//     dQ^T += K^T dS^T
//
// A slab is as tall as L1 allows: P or dS of 32 keys x 256 queries (16 KiB)
// beside a strip of Q or dO as deep. A chunk keeps dQ's accumulator from
// passing through the registers once a slab.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_BACKWARD_INL_H_
#define FA2_SRC_SIMD_AMX_BACKWARD_INL_H_

#include "src/simd/amx_backward_gradients-inl.h"
#include "src/simd/amx_backward_scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

template <class Variant, int kSteps>
class BackwardPass {
  using Tiles = typename Variant::Tiles;
  static constexpr int kIn = Variant::kInputTerms;
  static constexpr int kP = Variant::kProbabilityTerms;
  static constexpr int kDs = Variant::kGradientTerms;
  // Panels as wide as the head dim has steps, see ScoreLayout.
  static constexpr int kPanelTiles = kSteps == 0   ? 4
                                     : kSteps <= 2 ? 2
                                     : kSteps <= 4 ? 4
                                                   : 8;
  using Layout = ScoreLayout<kPanelTiles>;
  // Every other sub-block begins with dP, so that V and K are read twice in a
  // row: with 8 steps the two alone fill L1, and bf16 gains 1.5%, f16 2%. With
  // fewer it makes no difference.
  static constexpr bool kTakesTurns = kSteps == 8 && kIn <= 2;
  // Whether both products have as many steps, so that half of the fused pass
  // goes with each.
  static constexpr bool kEvenHalves = kSteps > 0 && !(kTakesTurns && kIn > 1);

 public:
  BackwardPass(const BackwardBlock& block)
      : b_(block),
        keys_(block.keys / 32),
        queries_(block.queries / 32),
        dt_(amx::DepthTiles(block.head_dim)),
        vt_(amx::DepthTiles(block.value_dim)),
        chunk_(BackwardScratch::ChunkPanels(block.keys, block.head_dim)),
        panels_(Layout::Panels(queries_)),
        slab_(SlabPanels(block.score, panels_)),
        s_(AlignPage(block.scratch), block.keys, block.queries, kP, kDs,
           chunk_),
        gradients_(block, s_, queries_, panels_, chunk_),
        dropout_(block.score, queries_, s_.keep) {}

  void Run() {
    Prepare();
    const FlushSubnormals flush;
    Tiles::Begin();
    dropout_.Begin(0);
    for (int64_t chunk = 0; chunk < keys_; chunk += chunk_) {
      const int64_t chunk_end = std::min(keys_, chunk + chunk_);
      for (int64_t slab = chunk; slab < chunk_end; slab += slab_) {
        const int64_t slab_end = std::min(chunk_end, slab + slab_);
        dropout_.Finish();
        ScoresAs(chunk, slab, slab_end);
        FetchBias(slab_end);
        if (dropout_.given() || b_.score.bias_stream.given()) {
          if (slab_end < keys_) dropout_.Begin(32 * slab_end);
          OptionsToCome side{dropout_, fetch_};
          gradients_.Keys(slab, slab_end, side);
        } else {
          NoSideWork side;
          gradients_.Keys(slab, slab_end, side);
        }
      }
      if (chunk == 0) gradients_.EnterQueries();
      gradients_.Queries(chunk, chunk_end);
    }
    gradients_.LeaveQueries();
    Tiles::End();
    // Stores past the caches wait for nobody: whoever is told that the block is
    // done must find them.
    if (b_.ds_stream.given()) _mm_sfence();
  }

 private:
  // As many keys as fill a slab, where there are few queries: the first and the
  // last sub-block of a slab have nothing to run beside. Dropout's bits come by
  // kSlabPanels.
  static int64_t SlabPanels(const ScoreOptions& score, int64_t panels) {
    const bool dropout = (GivenOptions(score) & kHasDropout) != 0;
    return dropout ? kSlabPanels
                   : kSlabPanels * (8 / kPanelTiles) /
                         std::min<int64_t>(8 / kPanelTiles, panels);
  }
  static void* AlignPage(void* p) {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(p) + 4095) &
                                   ~uintptr_t{4095});
  }

  // What of the next slab's options runs after four tile products.
  struct OptionsToCome {
    SlabDropout& dropout;
    StreamFetch& fetch;
    HWY_INLINE void Step() {
      dropout.Step();
      fetch.Step();
      fetch.Step();
    }
  };

  // Begins to ask for the bias of the slab from panel `slab` on; after the last
  // one, for that of the first against the queries after the block's, which are
  // most often next.
  void FetchBias(int64_t slab) {
    fetch_.Finish();
    ScoreStream bias = b_.score.bias_stream;
    if (!bias.given()) return;
    if (slab >= keys_) {
      if (b_.tiles != nullptr) return;
      bias.queries += b_.queries;
      fetch_.Begin(bias, 0, std::min(keys_, kSlabPanels), queries_, queries_);
      return;
    }
    const int64_t count = std::min(keys_ - slab, kSlabPanels);
    const auto hidden = [&](int64_t query) {
      return At(slab, query).hidden() && At(slab + count - 1, query).hidden();
    };
    int64_t first = 0, last = queries_;
    while (first < last && hidden(first)) ++first;
    while (first < last && hidden(last - 1)) --last;
    fetch_.Begin(bias, slab, count, first, last - first);
  }

  void Prepare() {
    const ScoreOptions& o = b_.score;
    c_.log2 = ScoreFactors(o, kLog2E<double>);
    c_.natural = ScoreFactors(o, 1.0);
    c_.options = GivenOptions(o) | (GivesScores() ? kGivesScoreGradient : 0) |
                 (b_.alibi_gradient != nullptr ? kGivesSlopeGradient : 0);
    c_.p_term = c_.ds_term = s_.slab_bytes;
    c_.pairs_term = s_.chunk_bytes;
    c_.slope_gradient = b_.alibi_gradient;
    // With dropout dP is multiplied by Z before delta is subtracted.
    const bool late = (GivenOptions(o) & kHasDropout) != 0;
    const float* lse = static_cast<const float*>(b_.lse);
    const float* delta = static_cast<const float*>(b_.delta);
    for (int64_t i = 0; i < b_.queries; ++i) {
      s_.lse2[i] =
          static_cast<float>(lse[i] * kLog2E<double> + ExpOrigin<Variant>());
      s_.tile_start[i] = late ? 0.0f : -delta[i];
      s_.late_delta[i] = late ? -delta[i] : 0.0f;
    }
    std::fill_n(s_.all_visible, 64, uint16_t{0xFFFF});
    ClassifySubBlocks(b_, queries_, s_.sub_blocks);
  }

  bool GivesScores() const { return b_.ds != nullptr || b_.ds_stream.given(); }

  const SubBlock& At(int64_t key_panel, int64_t query_panel) const {
    return s_.sub_blocks[key_panel * queries_ + query_panel];
  }

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
    VisibleRanges(At(key, query), b_.score, query, f.begin, f.end);
  }

  // The same for modes with options.
  void PlaceOptions(int64_t slab, int64_t key, int64_t query, FusedBlock& f) {
    const ScoreOptions& o = b_.score;
    const int64_t row = StagedRow(o, key, query);
    if (o.bias_stream.given()) {
      f.bias = s_.bias;
      f.fetch = &fetch_;
      TakePart(o.bias_stream, key, query, s_.bias);
    } else if (o.bias != nullptr) {
      f.bias = static_cast<const float*>(o.bias) + 32 * row;
      f.fetch = &fetch_;
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
    f.late_delta = s_.late_delta + 32 * query;
    f.position = s_.position;
    for (int i = 0; o.query_position != nullptr && i < 32; ++i) {
      s_.position[i] =
          static_cast<const float*>(o.query_position)[32 * query + i] -
          static_cast<float>(32 * key);
    }
    f.visible = s_.all_visible;
    if (At(key, query).visible()) return;
    f.visible = s_.visible;
    for (int r = 0; r < 32; ++r) {
      for (int h = 0; h < 2; ++h) {
        s_.visible[2 * r + h] = static_cast<uint16_t>(VisibleQueries(
            f.begin[r / 16] + 16 * h, f.end[r / 16] + 16 * h, f.key + r));
      }
    }
  }

  // Hidden sub-blocks that a product may pass through, and their dS output.
  void Clear(int64_t chunk, int64_t slab, int64_t key, int64_t query) const {
    FusedBlock f;
    Place(chunk, slab, key, query, f);
    const __m512 zero = _mm512_setzero_ps();
    for (int row = 0; row < 32; row += 2) {
      StoreRowPair<Variant, kPanelTiles>(c_, f, row, zero, zero, zero, zero,
                                         zero, zero, zero, zero);
    }
    if (!GivesScores()) return;
    float* out =
        b_.ds_stream.given()
            ? s_.score_gradient
            : static_cast<float*>(b_.ds) + StagedRow(b_.score, key, query) * 32;
    for (int i = 0; i < 32 * 32; i += 16) _mm512_storeu_ps(out + i, zero);
    if (b_.ds_stream.given()) GivePart(b_.ds_stream, key, query, out);
  }

  // Instances for options are for the fast variant and the usual head dims.
  void ScoresAs(int64_t chunk, int64_t slab, int64_t slab_end) {
    const FusedMode mode = ModeOf(c_.options);
    if (mode == FusedMode::kPlain) {
      return Scores<FusedMode::kPlain>(chunk, slab, slab_end);
    }
    if constexpr (kSteps > 0 && kP == 1) {
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

  template <FusedMode kPlainMode>
  void Scores(int64_t chunk, int64_t slab, int64_t slab_end) {
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
    for (int64_t key = slab; key < slab_end; ++key) {
      o.k = static_cast<const uint8_t*>(b_.k_score) + key * qk_panel;
      o.v = static_cast<const uint8_t*>(b_.v_score) + key * vo_panel;
      for (int64_t query = 0; query < queries_; ++query) {
        const SubBlock& sub = At(key, query);
        if (sub.hidden()) {
          if (sub.between || GivesScores()) Clear(chunk, slab, key, query);
          continue;
        }
        o.q = static_cast<const uint8_t*>(b_.q_score) + query * qk_panel;
        o.dout = static_cast<const uint8_t*>(b_.dout_score) + query * vo_panel;
        o.tile_start = s_.tile_start + 32 * query;
        // The upper halves of the leading product are still read when the next
        // ones arrive. Lower ones too, unless halves are even.
        o.lead[0][0] = t + (!kEvenHalves && parity ? 14 : 2) * kTileBytes;
        o.lead[0][1] = t + (!kEvenHalves && parity ? 13 : 1) * kTileBytes;
        o.lead[1][0] = t + (parity ? 10 : 6) * kTileBytes;
        o.lead[1][1] = t + (parity ? 9 : 5) * kTileBytes;
        const bool dp_leads = kTakesTurns && parity;
        parity = !parity;
        if (dp_leads) {
          // No second instance where S always leads.
          Advance<kPlainMode, kTakesTurns ? 1 : 0>(mode, o, fused);
        } else {
          Advance<kPlainMode, 0>(mode, o, fused);
        }
        if (mode != FusedMode::kNone) Give(fused);
        for (int i = 0; i < 2; ++i) {
          for (int j = 0; j < 2; ++j) {
            fused.s[i][j] = (dp_leads ? o.follow : o.lead)[i][j];
            fused.dp[i][j] = (dp_leads ? o.lead : o.follow)[i][j];
          }
        }
        Place(chunk, slab, key, query, fused);
        mode = kPlainMode;
        if (kPlainMode != FusedMode::kPlain) {
          PlaceOptions(slab, key, query, fused);
        } else if (!sub.visible()) {
          mode = FusedMode::kMasked;
        }
      }
    }
    if (mode == FusedMode::kNone) return;
    Tiles::template Store<0>(o.follow[0][0]);
    Tiles::template Store<1>(o.follow[0][1]);
    Tiles::template Store<2>(o.follow[1][0]);
    Tiles::template Store<3>(o.follow[1][1]);
    if (kPlainMode == FusedMode::kPlain && mode == FusedMode::kMasked) {
      FuseAll<Variant, kPanelTiles, FusedMode::kMasked>(c_, fused);
    } else {
      FuseAll<Variant, kPanelTiles, kPlainMode>(c_, fused);
    }
    Give(fused);
    Tiles::Fence();
  }

  // What the fused pass has left for ds_stream.
  HWY_INLINE void Give(const FusedBlock& fused) const {
    if (!b_.ds_stream.given()) return;
    GivePart(b_.ds_stream, fused.key / 32, fused.query / 32, s_.score_gradient);
  }

  template <FusedMode kPlainMode, int kLead>
  HWY_INLINE void Advance(FusedMode mode, const ScoreOperands& o,
                          const FusedBlock& fused) const {
    constexpr FusedMode kMasked = FusedMode::kMasked;
    if (mode == kPlainMode) {
      ScoreStep<Variant, kPanelTiles, kPlainMode, kSteps, kLead>(o, c_, fused);
    } else if (kPlainMode == FusedMode::kPlain && mode == kMasked) {
      ScoreStep<Variant, kPanelTiles, kMasked, kSteps, kLead>(o, c_, fused);
    } else {
      constexpr FusedMode kNone = FusedMode::kNone;
      ScoreStep<Variant, kPanelTiles, kNone, kSteps, kLead>(o, c_, fused);
    }
  }

  const BackwardBlock& b_;
  const int64_t keys_, queries_;  // panels
  const int64_t dt_, vt_;
  const int64_t chunk_;   // panels
  const int64_t panels_;  // of query tiles in a slab
  const int64_t slab_;    // keys of a slab, in panels
  const BackwardScratch s_;
  GradientProducts<Variant, kPanelTiles> gradients_;
  SlabDropout dropout_;
  StreamFetch fetch_;  // of bias_stream
  FusedContext c_;
};

template <class Variant>
void Backward(const BackwardBlock& block) {
  // Unrolled loops for the usual head dims.
  const int64_t dt = amx::DepthTiles(block.head_dim);
  if (dt == amx::DepthTiles(block.value_dim)) {
    switch (dt) {
      case 2:
        return BackwardPass<Variant, 2>(block).Run();
      case 4:
        return BackwardPass<Variant, 4>(block).Run();
      case 8:
        return BackwardPass<Variant, 8>(block).Run();
    }
  }
  BackwardPass<Variant, 0>(block).Run();
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_BACKWARD_INL_H_
