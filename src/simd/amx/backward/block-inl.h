// SPDX-License-Identifier: Apache-2.0

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

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_BACKWARD_BLOCK_INL_H_
#define FA2_SRC_SIMD_AMX_BACKWARD_BLOCK_INL_H_

#include <cmath>

#include "src/simd/amx/backward/gradients-inl.h"
#include "src/simd/amx/backward/slab_scores-inl.h"
#include "src/simd/amx/variant-inl.h"
#include "src/simd/math/prefetch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

template <class Variant, int kSteps>
class BackwardPass {
  using Tiles = typename Variant::Tiles;
  static constexpr int kP = Variant::kProbabilityTerms;
  static constexpr int kDs = Variant::kGradientTerms;
  using Scores = SlabScores<Variant, kSteps>;
  using Layout = typename Scores::Layout;

 public:
  BackwardPass(const BackwardBlock& block)
      : b_(block),
        keys_(block.keys / 32),
        queries_(block.queries / 32),
        chunk_(BackwardScratch::ChunkPanels(keys_, block.head_dim)),
        panels_(Layout::Panels(queries_)),
        slab_(SlabPanels(block.score, panels_)),
        s_(AlignPage(block.scratch), keys_, queries_, chunk_,
           Scores::kPanelTiles, kP, kDs),
        gradients_(block, s_, queries_, panels_, chunk_),
        dropout_(block.score, queries_, s_.keep),
        ahead_(block.ahead, keys_ * queries_ *
                                (amx::DepthTiles(block.head_dim) +
                                 amx::DepthTiles(block.value_dim))),
        scores_(block, s_, chunk_, dropout_, fetch_) {}

  static int64_t ScratchBytes(const BlockSizes& blocks, int64_t head_dim) {
    const int64_t keys = amx::Panels(blocks.keys);
    const BackwardScratch scratch(nullptr, keys, amx::Panels(blocks.queries),
                                  BackwardScratch::ChunkPanels(keys, head_dim),
                                  Scores::kPanelTiles, kP, kDs);
    return scratch.bytes + kPage;  // to align it
  }

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
        scores_.Run(chunk, slab, slab_end);
        FetchBias(slab_end);
        if (dropout_.given() || b_.score.bias_stream.given()) {
          if (slab_end < keys_) dropout_.Begin(32 * slab_end);
          OptionsToCome side{dropout_, fetch_, ahead_};
          gradients_.Keys(slab, slab_end, side);
        } else {
          gradients_.Keys(slab, slab_end, ahead_);
        }
      }
      if (chunk == 0) gradients_.WaitQueries();
      gradients_.Queries(chunk, chunk_end);
    }
    gradients_.ReleaseQueries();
    Tiles::End();
    // Non-temporal stores are not ordered with later ones: whoever is told that
    // the block is done must see them.
    if (b_.ds_stream.given()) hwy::FlushStream();
  }

 private:
  // As many keys as fill a slab, where there are few queries: the first and the
  // last sub-block of a slab have nothing to run beside. Dropout's bits come by
  // kSlabPanels.
  static int64_t SlabPanels(const ScoreOptions& score, int64_t panels) {
    const bool dropout = (GivenOptions(score) & kHasDropout) != 0;
    return dropout ? kSlabPanels
                   : kSlabPanels * (8 / Scores::kPanelTiles) /
                         std::min<int64_t>(8 / Scores::kPanelTiles, panels);
  }
  static constexpr int64_t kPage = 4096;
  static void* AlignPage(void* p) {
    return reinterpret_cast<void*>(
        (reinterpret_cast<uintptr_t>(p) + kPage - 1) & ~uintptr_t{kPage - 1});
  }

  // What of the next slab's options runs after four tile products, beside what
  // is read ahead.
  struct OptionsToCome {
    SlabDropout& dropout;
    StreamFetch& fetch;
    LinesAhead& ahead;
    HWY_INLINE void Step() {
      dropout.Step();
      fetch.Step();
      ahead.Step();
    }
  };

  // Begins to prefetch the bias of the slab from panel `slab` on; after the
  // last one, that of the first against the queries after the block's, which
  // are most often next.
  void FetchBias(int64_t slab) {
    fetch_.Finish();
    ScoreStream bias = b_.score.bias_stream;
    if (!bias.given()) return;
    if (slab >= keys_) {
      if (b_.tiles != nullptr) return;
      bias.queries += b_.queries;
      fetch_.Begin(bias, 0, std::min(keys_, kSlabPanels), kSlabPanels, queries_,
                   queries_);
      return;
    }
    const int64_t count = std::min(keys_ - slab, kSlabPanels);
    const auto hidden = [&](int64_t query) {
      return s_.sub_blocks.At(slab, query).hidden() &&
             s_.sub_blocks.At(slab + count - 1, query).hidden();
    };
    int64_t first = 0, last = queries_;
    while (first < last && hidden(first)) ++first;
    while (first < last && hidden(last - 1)) --last;
    fetch_.Begin(bias, slab, count, kSlabPanels, first, last - first);
  }

  void Prepare() {
    // See FuseOptions.
    const double kept = KeptFactor(b_.score);
    const double origin = ExpOrigin<Variant>() - std::log2(kept);
    const float* lse = static_cast<const float*>(b_.lse);
    const float* delta = static_cast<const float*>(b_.delta);
    for (int64_t i = 0; i < b_.queries; ++i) {
      s_.lse2[i] = static_cast<float>(lse[i] * kLog2E<double> + origin);
      s_.minus_delta[i] = static_cast<float>(-delta[i] / kept);
    }
    std::fill_n(s_.all_visible, 64, uint16_t{0xFFFF});
    ClassifySubBlocks(b_, s_.sub_blocks);
  }

  const BackwardBlock& b_;
  const int64_t keys_, queries_;  // panels
  const int64_t chunk_;           // panels
  const int64_t panels_;          // of query tiles in a slab
  const int64_t slab_;            // keys of a slab, in panels
  const BackwardScratch s_;
  GradientProducts<Variant, Scores::kPanelTiles> gradients_;
  SlabDropout dropout_;
  StreamFetch fetch_;  // of bias_stream
  LinesAhead ahead_;   // stepped beside the products of dK and dV
  Scores scores_;
};

// Loops are unrolled where both products of a sub-block have as many steps.
template <class Call>
HWY_INLINE void WithBackwardSteps(int64_t head_dim, int64_t value_dim,
                                  const Call& call) {
  const int64_t dt = amx::DepthTiles(head_dim);
  WithSteps(dt == amx::DepthTiles(value_dim) ? dt : 0, call);
}

template <class Variant>
void AmxBackward<Variant>::Run(const BackwardBlock& block) {
  WithBackwardSteps(block.head_dim, block.value_dim, [&](auto steps) HWY_ATTR {
    BackwardPass<Variant, steps>(block).Run();
  });
}

template <class Variant>
size_t AmxBackward<Variant>::ScratchBytes(const BlockSizes& blocks,
                                          int64_t head_dim, int64_t value_dim) {
  int64_t bytes = 0;
  WithBackwardSteps(head_dim, value_dim, [&](auto steps) {
    bytes = BackwardPass<Variant, steps>::ScratchBytes(blocks, head_dim);
  });
  return static_cast<size_t>(bytes);
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_BACKWARD_BLOCK_INL_H_
