// SPDX-License-Identifier: Apache-2.0

// The forward pass of a block on AMX, with an online softmax.
//
// For 32 queries at a time, keys go by strips of 128 (a head dim of 256: 256):
// S^T of the strip (16 KiB, in L1 beside P), its row maxima, the exponentials
// (P as right operand, taken while the tile unit computes S of the next strip
// and, some of them, O of the strip before), O^T += V^T P^T. Nothing of it
// depends on what other queries the block has.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_BLOCK_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_BLOCK_INL_H_

#include "src/simd/amx/dropout-inl.h"
#include "src/simd/amx/forward/scores-inl.h"
#include "src/simd/amx/forward/scratch-inl.h"
#include "src/simd/amx/forward/strip-inl.h"
#include "src/simd/amx/forward/strip_maxima-inl.h"
#include "src/simd/amx/forward/values-inl.h"
#include "src/simd/amx/stream-inl.h"
#include "src/simd/amx/variant-inl.h"
#include "src/simd/amx/visibility.h"
#include "src/simd/math/prefetch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

template <class Variant, int kSteps>
class ForwardPass {
  using Tiles = typename Variant::Tiles;
  using Scratch = ForwardScratch<Variant, kSteps>;
  static constexpr int kIn = Variant::kInputTerms;
  static constexpr int kScore = Variant::kProbabilityTerms;
  static constexpr int64_t kStripPanels = Scratch::kStripPanels;
  static constexpr int64_t kEarly = Scratch::kEarly;
  static constexpr int64_t kTwice = Scratch::kTwice;
  static constexpr int64_t kTermBytes = Scratch::kTermBytes;
  static constexpr bool kUsual = Scratch::kUsual;
  template <FusedMode kMode>
  static constexpr bool kMayBeEarly = kEarly > 0 && kMode != FusedMode::kBias;

 public:
  explicit ForwardPass(const ForwardBlock& block)
      : b_(block),
        keys_(block.keys / 32),
        queries_(block.queries / 32),
        dt_(amx::DepthTiles(block.head_dim)),
        key_tiles_(block.k_stride == 0 ? KeyTiles::Packed(dt_)
                                       : KeyTiles::Lying(block.k_stride)),
        chunk_(amx::ChunkPanels(block.value_dim)),
        v_(block),
        scratch_(block.scratch, queries_),
        pending_(scratch_.dummy),
        dropout_(block.score),
        maxima_(block, scratch_.sub_blocks, scratch_.s, scratch_.bias),
        exp_{ScoreFactors(block.score, kLog2E<float>), sum_, kTermBytes},
        ahead_(block.ahead, queries_ * keys_ * (1 + v_.pairs())) {}

  void Run() {
    ClassifySubBlocks(b_, scratch_.sub_blocks);
    const FlushSubnormals flush;
    Tiles::Begin();
    const FusedMode mode = maxima_.mode();
    if (mode == FusedMode::kPlain) {
      Strips<FusedMode::kPlain>();
    } else if (kUsual && mode == FusedMode::kSoftcap) {
      Strips<FusedMode::kSoftcap>();
    } else if (kUsual && mode == FusedMode::kAlibi && maxima_.alibi().given()) {
      Strips<FusedMode::kAlibi>();
    } else {
      Strips<FusedMode::kBias>();
    }
    Tiles::End();
  }

 private:
  // The next strip; clears the accumulators of query panels that see nothing.
  void NextStrip(StripCursor& cursor, Strip& strip) const {
    cursor.Next(strip, [this](int64_t query) {
      if (b_.first) std::memset(v_.Output(query), 0, v_.OutputBytes());
    });
  }

  // kMode: that of ExpRowPair.
  template <FusedMode kMode>
  void Strips() {
    Strip strips[3];
    Strip* current = &strips[0];
    Strip* next = &strips[1];
    Strip* after = &strips[2];
    StripCursor cursor(scratch_.sub_blocks, keys_, chunk_, kStripPanels);
    Strip none;
    NextStrip(cursor, *next);
    NextStrip(cursor, *after);
    if (next->query >= 0) {
      Fetch(*next);
      Scores<kMode>(*next, none);
      ValuesAndMaxima<kMode>(none, *next, true);
    }
    Fetch(*after);
    while (next->query >= 0) {
      Strip* const done = current;
      current = next;
      next = after;
      after = done;
      NextStrip(cursor, *after);
      Fetch(*after);
      if (!Scores<kMode>(*next, *current)) {
        // S has been overwritten by that of `next`.
        maxima_.KeepNoMore();
        Scores<kMode>(*current, none);
        ValuesAndMaxima<kMode>(none, *current, false);
        Scores<kMode>(*next, *current);
      }
      // Dropout's bits of `current` have been used.
      ValuesAndMaxima<kMode>(*current, *next, true);
    }
    Flush();
  }

  // Begins to prefetch the bias of a strip, two strips ahead of its use.
  void Fetch(const Strip& strip) {
    fetch_.Finish();
    if (strip.query < 0) return;
    fetch_.Begin(b_.score.bias_stream, strip.key[0],
                 strip.key[strip.count - 1] + 1 - strip.key[0], 1, strip.query,
                 1);
  }

  // S of `next`, and what is left of P of `current` meanwhile; each of them may
  // be no strip. They share the buffer of S: a sub-block of `next` arrives
  // where one of `current` has just been read. False if the maxima kept for
  // `current` were too low, so that P is of no use.
  template <FusedMode kMode>
  bool Scores(const Strip& next, const Strip& current) {
    if constexpr (kMayBeEarly<kMode> && kTwice > 0) {
      if (early_) return LateScores<kMode>(next, current);
    }
    const int64_t taken = early_ ? kEarly : 0;
    const int64_t count = std::max(next.count, current.count - taken);
    for (int64_t i = 0; i < count; ++i) {
      ExpBlock e;
      if (i + taken < current.count) e = BlockOf<kMode>(current, i + taken);
      ScoreStep<kMode, 16>(next, i, e);
    }
    return FinishExponentials(current);
  }

  // The same where half of the exponentials are left: half a sub-block's beside
  // each sub-block of S.
  template <FusedMode kMode>
  bool LateScores(const Strip& next, const Strip& current) {
    for (int64_t i = 0; i < kStripPanels; ++i) {
      const ExpBlock e = BlockOf<kMode>(current, kEarly + i / 2);
      ScoreStep<kMode, 8>(next, i, e.Half(i % 2));
    }
    return FinishExponentials(current);
  }

  // What Scores returns; the sums join the running ones if they serve.
  bool FinishExponentials(const Strip& current) {
    Tiles::Fence();
    if (current.query < 0) return true;
    early_ = false;
    const bool serves = !maxima_.kept() || SumsAreLow(sum_);
    float* l = static_cast<float*>(b_.row_sum) + 32 * current.query;
    for (int i = 0; i < 32; ++i) {
      if (serves) l[i] += sum_[i];
      sum_[i] = 0.0f;
    }
    return serves;
  }

  // Sub-block i of the strip whose exponentials are due.
  template <FusedMode kMode>
  HWY_INLINE ExpBlock BlockOf(const Strip& strip, int64_t i) {
    const int64_t key = strip.key[i], query = strip.query;
    ExpBlock e;
    e.s = maxima_.ScoreTile(i);
    e.p = scratch_.p + PairPlace<kTwice>(turn_, i) * 2 * kTileBytes;
    if (dropout_.given()) {
      e.keep = scratch_.keep + 64 * i;
    } else if (b_.score.dropout != nullptr) {
      e.keep = static_cast<const uint16_t*>(b_.score.dropout) +
               2 * StagedRow(b_.score, key, query);
    }
    e.transformed = maxima_.template Transforms<kMode>(strip, i);
    e.scale = e.transformed ? kLog2E<float> : exp_.factors.scale;
    e.max = maxima_.max();
    if (b_.score.bias_stream.given()) e.fetch = &fetch_;
    if (kMode == FusedMode::kBias && e.transformed) {
      e.max = maxima_.NaturalMax(query, other_max_);
    }
    if (kMode == FusedMode::kAlibi && !e.transformed) {
      e.max = maxima_.alibi().Lift(e.max, key, query, other_max_);
      e.row_penalty = maxima_.alibi().RowPenalty(key, query);
    }
    if (strip.large) {
      e.large = true;
      e.scale = kLog2E<float>;
      e.max = maxima_.NaturalMax(query, other_max_);
    }
    return e;
  }

  // S of sub-block i of `next`, if there is one, beside the exponentials of
  // kRows row pairs of `e`, if it is one.
  template <FusedMode kMode, int kRows>
  HWY_INLINE void ScoreStep(const Strip& next, int64_t i, const ExpBlock& e) {
    ahead_.Step();
    // Of scores: those with bias are not times log2(e).
    constexpr FusedMode kTransformed =
        kMode == FusedMode::kBias ? FusedMode::kGeneral : FusedMode::kPlain;
    const bool transformed = kMode != FusedMode::kPlain && e.transformed;
    if (kRows == 16 && e.large) {
      ExpAll<Variant, FusedMode::kGeneral, ScoreRowOrder<kSteps, kRows>>(exp_,
                                                                         e);
      if (i < next.count) {
        ScoresOf<FusedMode::kNone, kRows>(next, i, ExpBlock());
      }
    } else if (i >= next.count) {
      using Order = ScoreRowOrder<kSteps, kRows>;
      if (transformed) {
        ExpAll<Variant, kTransformed, Order>(exp_, e);
      } else {
        ExpAll<Variant, kMode, Order>(exp_, e);
      }
    } else if (kRows == 16 && e.s == nullptr) {
      ScoresOf<FusedMode::kNone, kRows>(next, i, e);
    } else if (transformed) {
      ScoresOf<kTransformed, kRows>(next, i, e);
    } else {
      ScoresOf<kMode, kRows>(next, i, e);
    }
  }

  template <FusedMode kMode, int kRows>
  HWY_INLINE void ScoresOf(const Strip& strip, int64_t i, const ExpBlock& e) {
    const int64_t panel = 2 * dt_ * kIn * kTileBytes;
    const int64_t key_panel = b_.k_stride == 0 ? panel : 64 * b_.k_stride;
    ForwardScoreStep<Variant, kSteps, kMode, kRows>(
        static_cast<const uint8_t*>(b_.k_score) + strip.key[i] * key_panel,
        key_tiles_,
        static_cast<const uint8_t*>(b_.q_score) + strip.query * panel, dt_,
        maxima_.ScoreTile(i), pending_, exp_, e);
  }

  void Flush() {
    StorePending<Tiles>(pending_);
    pending_ = scratch_.dummy;
  }

  // What S of a strip needs before its exponentials can be taken, a quarter of
  // a sub-block at a time between the tile products of O: bias, dropout's bits.
  template <FusedMode kMode>
  struct StripWork {
    StripWork(ForwardPass& of, Strip& strip, int64_t steps)
        : pass(of),
          strip(strip),
          parts(4 * strip.count),
          each(steps > 0 ? (parts + steps - 1) / steps : parts) {}
    // After four tile products.
    HWY_INLINE void Step() {
      pass.ahead_.Step();
      for (int64_t i = 0; i < each && part < parts; ++i, ++part) {
        pass.Part<kMode>(strip, part / 4, part % 4);
      }
    }
    void Finish() {
      while (part < parts) Step();
    }
    ForwardPass& pass;
    Strip& strip;
    const int64_t parts;
    const int64_t each;
    int64_t part = 0;
  };

  // O of `current`, and all that S of `next` needs, with the maxima there are
  // where they may be kept and `may_keep`. Each may be no strip.
  template <FusedMode kMode>
  void ValuesAndMaxima(const Strip& current, Strip& next, bool may_keep) {
    bool keep = false;
    // Else the first product of O stores what is pending of S, as the first one
    // of S does with O (waiting for them: 3-5% at D 64 and 128).
    if (current.query < 0 || v_.pairs() == 0) Flush();
    if (kMode == FusedMode::kBias || dropout_.given()) {
      StripWork<kMode> work(*this, next, v_.pairs() * current.count);
      if (current.query >= 0) Values(current, work);
      work.Finish();
      RestoreScores(next);
      keep = may_keep && maxima_.template MayKeep<kMode>(next);
    } else {
      keep = may_keep && maxima_.template MayKeep<kMode>(next);
      if constexpr (kMayBeEarly<kMode>) {
        early_ = keep && AreAlike(current, next);
        if (early_) ValuesAndExponentials<kMode>(current, next);
      }
      if (!early_ && current.query >= 0) Values(current, ahead_);
    }
    maxima_.Begin(keep);
    maxima_.template See<kMode>(next);
    maxima_.template RoundIfLarge<kMode>(next);
    // Kept for the same queries, maxima stay what they are.
    if (next.query < 0 || (keep && next.query == current.query)) return;
    Floats alpha[2];
    if (maxima_.template Raise<kMode>(next, alpha) && !v_.Starts(next)) {
      Flush();
      ScaleQueries<Tiles>(v_.Output(next.query), 4 * v_.pairs(), alpha);
    }
  }

  // S of sub-blocks whose bias has turned out to need more care.
  void RestoreScores(Strip& strip) {
    for (int64_t i = 0; i < strip.count; ++i) {
      if (strip.sum[i] != SumState::kPartOfBias) continue;
      ScoresOf<FusedMode::kNone, 16>(strip, i, ExpBlock());
      Flush();
      strip.sum[i] = SumState::kNone;
    }
  }

  template <FusedMode kMode>
  HWY_NOINLINE void Part(Strip& strip, int64_t i, int64_t quarter) {
    if (dropout_.given()) {
      dropout_.Draw(32 * strip.key[i] + 8 * quarter, 32 * strip.query,
                    scratch_.keep + 64 * i + 16 * quarter);
    }
    if (kMode == FusedMode::kBias) {
      for (int n = 0; n < 4; ++n) fetch_.Step();
      maxima_.AddBias(strip, i, quarter);
    }
  }

  // O^T += V^T P^T of a strip.
  template <class Side>
  void Values(const Strip& strip, Side& side) {
    v_.Add(strip, Probabilities(), pending_, side);
    turn_ ^= 1;
    Tiles::Fence();
  }

  // Both are whole strips of the same queries and not their first: a choice
  // that sums depend on, and so one that must not depend on other queries.
  bool AreAlike(const Strip& current, const Strip& next) const {
    return v_.pairs() == kSteps && current.query == next.query &&
           current.count == kStripPanels && next.count == kStripPanels &&
           current.unbroken() && !v_.Starts(current);
  }

  // The same beside the exponentials of the first kEarly sub-blocks of `next`.
  template <FusedMode kMode>
  void ValuesAndExponentials(const Strip& current, const Strip& next) {
    const auto right = Probabilities();
    auto left = v_.UnbrokenOf(current);
    PendingSquare out{v_.Output(current.query)};
    turn_ ^= 1;
    for (int64_t i = kEarly - kSteps; i < kEarly; ++i) {
      if (i < 0) {
        NoSideWork side;
        Product<Variant, true>(left, right, 0, kStripPanels, out, pending_,
                               side);
      } else {
        // With one place for P, from the second step on, when that of the first
        // sub-block has been read.
        ForwardValueStep<Variant, kMode, static_cast<int>(kStripPanels),
                         kTwice == 0>(left, right, out, pending_, exp_,
                                      BlockOf<kMode>(next, i));
      }
      left.base += 2 * left.i_bytes;
      out.c += 4 * kTileBytes;
    }
    Tiles::Fence();
  }

  // P of the strip whose exponentials have been taken.
  StripPairs<kScore, kTwice> Probabilities() const {
    return {scratch_.p, kTermBytes, turn_};
  }

  const ForwardBlock& b_;
  const int64_t keys_, queries_;  // panels
  const int64_t dt_;
  const KeyTiles key_tiles_;
  const int64_t chunk_;
  const ForwardValues<Variant> v_;
  const Scratch scratch_;
  PendingSquare pending_;
  const DropoutBits dropout_;
  StreamFetch fetch_;  // of bias_stream
  StripMaxima<Variant> maxima_;
  alignas(64) float other_max_[32];  // ExpBlock::max, unless maxima_'s
  // Of the strip whose exponentials are due: what they sum to so far, its turn
  // (PairPlace), and whether those of kEarly sub-blocks have been taken.
  alignas(64) float sum_[32] = {};
  const ExpState exp_;
  LinesAhead ahead_;  // stepped beside each sub-block and each product of O
  int64_t turn_ = 0;
  bool early_ = false;
};

template <class Variant>
void AmxForward<Variant>::Run(const ForwardBlock& block) {
  WithSteps(amx::DepthTiles(block.head_dim), [&](auto steps) HWY_ATTR {
    ForwardPass<Variant, steps>(block).Run();
  });
}

template <class Variant>
size_t AmxForward<Variant>::ScratchBytes(const BlockSizes& blocks,
                                         int64_t head_dim,
                                         int64_t /*value_dim*/) {
  int64_t bytes = 0;
  WithSteps(amx::DepthTiles(head_dim), [&](auto steps) {
    bytes = ForwardScratch<Variant, steps>::Bytes(amx::Panels(blocks.keys),
                                                  amx::Panels(blocks.queries));
  });
  return static_cast<size_t>(bytes);
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_BLOCK_INL_H_
