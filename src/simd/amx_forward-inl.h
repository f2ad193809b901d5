// The forward pass of a block on AMX, with an online softmax.
//
// For 32 queries at a time, keys go by strips of 128 (a head dim of 256: 256):
// S^T of the strip (16 KiB, in L1 beside P), its row maxima, the exponentials
// (P as right operand, taken while the tile unit computes S of the next strip),
// O^T += V^T P^T.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_INL_H_

#include "src/simd/amx_alibi-inl.h"
#include "src/simd/amx_dropout-inl.h"
#include "src/simd/amx_forward_scores-inl.h"
#include "src/simd/amx_running_maxima-inl.h"
#include "src/simd/amx_stream-inl.h"
#include "src/simd/amx_strip-inl.h"
#include "src/simd/amx_visibility.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

template <class Variant, int kSteps>
class ForwardPass {
  using Tiles = typename Variant::Tiles;
  static constexpr int kIn = Variant::kInputTerms;
  static constexpr int kScore = Variant::kProbabilityTerms;
  // Where products of O are long, longer strips spare loads and stores of O
  // (D 256: 0.42 -> 0.46 of the peak); where they are not, S and P of a short
  // strip stay in L1 (D 64: 0.23 -> 0.26, D 128: 0.35 -> 0.39).
  static constexpr int64_t kStripPanels =
      kSteps == 2 || kSteps == 4 ? 4 : kMostStripPanels;
  static constexpr int64_t kTermBytes = kStripPanels * 2 * kTileBytes;
  static constexpr bool kUsual = Variant::kFast && kSteps > 0;

 public:
  // Bytes of scratch for `keys` x `queries`, both in panels.
  static int64_t ScratchBytes(int64_t keys, int64_t queries) {
    return kStripPanels * 4 * kTileBytes + kTermBytes * kScore + kTileBytes +
           4 * 128 + kStreamElements * 4 + kStripPanels * 128 +
           (keys * queries * int64_t{sizeof(SubBlock)} + 63) / 64 * 64;
  }

  explicit ForwardPass(const ForwardBlock& block)
      : b_(block),
        keys_(block.keys / 32),
        queries_(block.queries / 32),
        dt_(amx::DepthTiles(block.head_dim)),
        vt_(amx::DepthTiles(block.value_dim)),
        chunk_(amx::ChunkPanels(block.value_dim)),
        dropout_(block.score),
        alibi_(block.score) {
    uint8_t* p = static_cast<uint8_t*>(block.scratch);
    const auto take = [&p](int64_t n) {
      uint8_t* taken = p;
      p += n;
      return taken;
    };
    s_ = take(kStripPanels * 4 * kTileBytes);
    p_ = take(kTermBytes * kScore);
    dummy_ = {take(kTileBytes), 0, 0};
    max_ = reinterpret_cast<float*>(take(128));
    all_ = reinterpret_cast<float*>(take(2 * 128));
    bias_ = reinterpret_cast<float*>(take(kStreamElements * 4));
    keep_ = reinterpret_cast<uint16_t*>(take(kStripPanels * 128));
    sub_blocks_ = reinterpret_cast<SubBlock*>(p);
  }

  void Run() {
    const ScoreOptions& o = b_.score;
    // A negative scale turns maxima of products into minima.
    const int options = GivenOptions(o) & (kHasBias | kHasAlibi | kHasSoftcap);
    mode_ = o.scale > 0.0 ? ModeOf(options) : FusedMode::kGeneral;
    given_ = options;
    factors_ = ScoreFactors(o, 1.0);
    scale_ = mode_ == FusedMode::kPlain ? static_cast<float>(o.scale) : 1.0f;
    for (int i = 0; i < 32; ++i) {
      all_[i] = -HUGE_VALF;
      all_[32 + i] = HUGE_VALF;
    }
    ClassifySubBlocks(b_, queries_, sub_blocks_);
    const FlushSubnormals flush;
    Tiles::Begin();
    pending_ = dummy_;
    if (mode_ == FusedMode::kPlain) {
      Strips<FusedMode::kPlain>();
    } else if (kUsual && mode_ == FusedMode::kSoftcap) {
      Strips<FusedMode::kSoftcap>();
    } else if (kUsual && mode_ == FusedMode::kAlibi && alibi_.given()) {
      Strips<FusedMode::kAlibi>();
    } else {
      Strips<FusedMode::kBias>();
    }
    Tiles::End();
  }

 private:
  const SubBlock& At(int64_t key, int64_t query) const {
    return sub_blocks_[key * queries_ + query];
  }
  uint8_t* OutputPanel(int64_t query) const {
    return static_cast<uint8_t*>(b_.out) + query * vt_ * 4 * kTileBytes;
  }

  // The next strip; clears the accumulators of query panels that see nothing.
  void NextStrip(StripCursor& cursor, Strip& strip) const {
    cursor.Next(strip, [this](int64_t query) {
      if (b_.first) std::memset(OutputPanel(query), 0, vt_ * 4 * kTileBytes);
    });
  }

  // kMode: that of ExpRowPair.
  template <FusedMode kMode>
  void Strips() {
    Strip current, next, after;
    StripCursor cursor(sub_blocks_, keys_, queries_, chunk_, kStripPanels);
    const Strip none;
    NextStrip(cursor, next);
    NextStrip(cursor, after);
    if (next.query >= 0) {
      Fetch(next);
      Scores<kMode>(next, none);
      ValuesAndMaxima<kMode>(none, next, MayKeepMaxima<kMode>(next));
    }
    Fetch(after);
    while (next.query >= 0) {
      current = next;
      next = after;
      NextStrip(cursor, after);
      Fetch(after);
      if (!Scores<kMode>(next, current)) {
        Scores<kMode>(current, none);
        ValuesAndMaxima<kMode>(none, current, false);
        Scores<kMode>(next, current);
      }
      // Dropout's bits of `current` have been used.
      ValuesAndMaxima<kMode>(current, next, MayKeepMaxima<kMode>(next));
    }
  }

  // Begins to ask for the bias of a strip, two strips ahead of its use.
  void Fetch(const Strip& strip) {
    fetch_.Finish();
    if (strip.query < 0) return;
    fetch_.Begin(b_.score.bias_stream, strip.key[0],
                 strip.key[strip.count - 1] + 1 - strip.key[0], strip.query, 1);
  }

  uint8_t* ScoreTile(int64_t i) const { return s_ + i * 4 * kTileBytes; }

  // The option is worked in with the exponentials, where all is visible.
  static constexpr bool InExponentials(FusedMode mode) {
    return mode == FusedMode::kAlibi || mode == FusedMode::kSoftcap;
  }

  // Whether S of a sub-block is replaced by the scores before exponentials are
  // taken.
  template <FusedMode kMode>
  bool Transforms(int64_t key, int64_t query) const {
    if (kMode == FusedMode::kBias) return true;
    if (!InExponentials(kMode)) return false;
    if (!At(key, query).visible()) return true;
    return kMode == FusedMode::kAlibi && !alibi_.OneSided(key, query);
  }

  // Whether exponentials of a strip may be taken with the maxima of the strips
  // before: most strips raise none, and to find that out takes 65 cycles a
  // sub-block. Sums tell if one was too low.
  template <FusedMode kMode>
  bool MayKeepMaxima(const Strip& strip) const {
    if (kMode != FusedMode::kPlain || strip.query < 0) return false;
    for (int64_t i = 0; i < strip.count; ++i) {
      if (!At(strip.key[i], strip.query).visible()) return false;
    }
    return HaveMaxima(static_cast<const float*>(b_.row_max) + 32 * strip.query);
  }

  // S of `next`, and P of `current` meanwhile; each of them may be no strip.
  // They share the buffer of S: a sub-block of `next` arrives where one of
  // `current` has just been read. False if the maxima kept for `current` were
  // too low, so that P is of no use.
  template <FusedMode kMode>
  bool Scores(const Strip& next, const Strip& current) {
    ExpState state;
    alignas(64) float sum[32] = {};
    state.factors = ScoreFactors(b_.score, kLog2OfE);
    state.sum = sum;
    state.term_bytes = kTermBytes;
    const int64_t panel = 2 * dt_ * kIn * kTileBytes;
    const int64_t count = std::max(next.count, current.count);
    for (int64_t i = 0; i < count; ++i) {
      ExpBlock e;
      if (i < current.count) {
        const int64_t key = current.key[i], query = current.query;
        e.s = ScoreTile(i);
        e.p = p_ + i * 2 * kTileBytes;
        if (dropout_.given()) {
          e.keep = keep_ + 64 * i;
        } else if (b_.score.dropout != nullptr) {
          e.keep = static_cast<const uint16_t*>(b_.score.dropout) +
                   2 * StagedRow(key, query);
        }
        e.transformed = Transforms<kMode>(key, query);
        e.scale = e.transformed ? kLog2OfE : state.factors.scale;
        e.max = max_;
        if (b_.score.bias_stream.given()) e.fetch = &fetch_;
        if (kMode == FusedMode::kAlibi && !e.transformed) {
          e.max = alibi_.Lift(max_, key, query, lifted_);
          e.row_penalty = alibi_.RowPenalty(key, query);
        }
      }
      if (i < next.count) {
        const uint8_t* const k =
            static_cast<const uint8_t*>(b_.k_score) + next.key[i] * panel;
        const uint8_t* const q =
            static_cast<const uint8_t*>(b_.q_score) + next.query * panel;
        const PendingTiles c{ScoreTile(i), 2 * kTileBytes, kTileBytes};
        if (e.s == nullptr) {
          ForwardScoreStep<Variant, kSteps, FusedMode::kNone>(
              k, q, dt_, c, pending_, state, e);
        } else if (InExponentials(kMode) && e.transformed) {
          ForwardScoreStep<Variant, kSteps, FusedMode::kPlain>(
              k, q, dt_, c, pending_, state, e);
        } else {
          ForwardScoreStep<Variant, kSteps, kMode>(k, q, dt_, c, pending_,
                                                   state, e);
        }
      } else {
        if (i == next.count) Flush();
        if (InExponentials(kMode) && e.transformed) {
          ExpAll<Variant, FusedMode::kPlain>(state, e);
        } else {
          ExpAll<Variant, kMode>(state, e);
        }
      }
    }
    if (next.count >= current.count) Flush();
    Tiles::Fence();
    if (current.query < 0) return true;
    if (kept_ && !SumsAreLow(sum)) return false;
    float* l = static_cast<float*>(b_.row_sum) + 32 * current.query;
    for (int i = 0; i < 32; ++i) l[i] += sum[i];
    return true;
  }

  void Flush() {
    StorePending<Tiles>(pending_);
    pending_ = dummy_;
  }

  // What S of a strip needs before its exponentials can be taken, a quarter of
  // a sub-block at a time between the tile products of O: its maxima, the
  // scores in place of S, dropout's bits.
  template <FusedMode kMode>
  struct StripWork {
    StripWork(ForwardPass& of, const Strip& strip, int64_t steps)
        : pass(of),
          strip(strip),
          parts(4 * strip.count),
          each(steps > 0 ? (parts + steps - 1) / steps : parts) {}
    // After four tile products.
    HWY_INLINE void Step() {
      for (int64_t i = 0; i < each && part < parts; ++i, ++part) {
        pass.Part<kMode>(strip, part / 4, part % 4);
      }
    }
    void Finish() {
      while (part < parts) Step();
    }
    ForwardPass& pass;
    const Strip& strip;
    const int64_t parts;
    const int64_t each;
    int64_t part = 0;
  };

  // O of `current`, and all that S of `next` needs, with the maxima there are
  // if `keep`. Each may be no strip.
  template <FusedMode kMode>
  void ValuesAndMaxima(const Strip& current, const Strip& next, bool keep) {
    __m512 max[4];
    NoMaxima(max);
    for (int h = 0; h < 2; ++h) _mm512_store_ps(seen_ + 16 * h, max[h]);
    kept_ = keep;
    if (kMode == FusedMode::kBias || dropout_.given()) {
      StripWork<kMode> work(*this, next, vt_ * current.count);
      if (current.query >= 0) Values(current, work);
      work.Finish();
    } else {
      NoSideWork side;
      if (current.query >= 0) Values(current, side);
      for (int64_t i = 0; !kept_ && i < next.count; ++i) {
        SubBlockMaxima<kMode>(next, i, max);
      }
      SeeMaxima(max);
    }
    if (next.query >= 0) Raise<kMode>(next);
  }

  template <FusedMode kMode>
  HWY_NOINLINE void Part(const Strip& strip, int64_t i, int64_t quarter) {
    const int64_t key = strip.key[i], query = strip.query;
    const ScoreOptions& o = b_.score;
    if (dropout_.given()) {
      for (int half = 0; half < 2; ++half) {
        dropout_.Draw(32 * key + 8 * quarter, 32 * query + 16 * half,
                      keep_ + 64 * i + 16 * quarter + half);
      }
    }
    const SubBlock& sub = At(key, query);
    if (kMode == FusedMode::kBias) {
      for (int n = 0; n < 4; ++n) fetch_.Step();
      if (mode_ == FusedMode::kBias && sub.visible() && o.bias_stream.given()) {
        const StreamPart part(o.bias_stream, key, query);
        if (IsPlain(part)) {
          const int64_t k = quarter / 2, q = quarter % 2;
          const int64_t stride = part.matrix.query_stride;
          AddBiasSquare(static_cast<const float*>(part.matrix.data) +
                            16 * (q * stride + k),
                        stride, factors_.scale,
                        ScoreTile(i) + (2 * k + q) * kTileBytes,
                        seen_ + 16 * q);
          return;
        }
      }
    }
    if (quarter != 0 || kept_) return;
    __m512 max[4];
    NoMaxima(max);
    SubBlockMaxima<kMode>(strip, i, max);
    SeeMaxima(max);
  }

  static HWY_INLINE void NoMaxima(__m512 (&max)[4]) {
    for (__m512& m : max) m = _mm512_set1_ps(-HUGE_VALF);
  }
  HWY_INLINE void SeeMaxima(const __m512 (&max)[4]) {
    for (int h = 0; h < 2; ++h) {
      _mm512_store_ps(seen_ + 16 * h,
                      _mm512_max_ps(_mm512_max_ps(max[2 * h], max[2 * h + 1]),
                                    _mm512_load_ps(seen_ + 16 * h)));
    }
  }

  // The maxima of S or the scores, or what they cannot exceed, join `max` as in
  // ColumnMaxima; S is replaced by the scores where it must be.
  template <FusedMode kMode>
  HWY_INLINE void SubBlockMaxima(const Strip& strip, int64_t i,
                                 __m512 (&max)[4]) const {
    const int64_t key = strip.key[i], query = strip.query;
    const SubBlock& sub = At(key, query);
    if (Transforms<kMode>(key, query) || !sub.visible()) {
      return Transform(sub, ScoreTile(i), key, query, max);
    }
    if (!InExponentials(kMode)) return ColumnMaxima(ScoreTile(i), max);
    __m512 products[4];
    NoMaxima(products);
    ColumnMaxima(ScoreTile(i), products);
    for (int h = 0; h < 2; ++h) {
      const __m512 most = _mm512_max_ps(products[2 * h], products[2 * h + 1]);
      max[2 * h] = _mm512_max_ps(Bound<kMode>(most, key, query, h), max[2 * h]);
    }
  }

  // What the scores of a column of a sub-block do not exceed, from the greatest
  // product.
  template <FusedMode kMode>
  __m512 Bound(__m512 product, int64_t key, int64_t query, int half) const {
    if (kMode == FusedMode::kAlibi) {
      return alibi_.Bound(product, key, query, half);
    }
    return _mm512_mul_ps(TanhOfSteps(_mm512_mul_ps(
                             product, _mm512_set1_ps(factors_.into_steps))),
                         _mm512_set1_ps(factors_.softcap));
  }

  // Moves the running maxima on and scales what has been summed so far.
  template <FusedMode kMode>
  void Raise(const Strip& strip) {
    const int64_t query = strip.query;
    __m512 alpha[2];
    const bool scaled =
        RaiseMaxima(seen_, scale_, kMode == FusedMode::kBias ? 1.0f : kLog2OfE,
                    static_cast<float*>(b_.row_max) + 32 * query,
                    static_cast<float*>(b_.row_sum) + 32 * query, max_, alpha);
    if (scaled && !Starts(strip)) {
      ScaleQueries<Tiles>(OutputPanel(query), 4 * vt_, alpha);
    }
  }

  int64_t StagedRow(int64_t key, int64_t query) const {
    return query * b_.score.staged_key_rows + 32 * key;
  }

  void Transform(const SubBlock& sub, uint8_t* s, int64_t key, int64_t query,
                 __m512 (&max)[4]) const {
    const ScoreOptions& o = b_.score;
    TransformBlock t;
    t.s = s;
    Ranges(sub, query, t.begin, t.end);
    t.key = 32 * key;
    t.bias = nullptr;
    if (o.bias_stream.given()) {
      t.bias = bias_;
      TakePart(o.bias_stream, key, query, bias_);
    } else if (o.bias != nullptr) {
      t.bias = static_cast<const float*>(o.bias) + 32 * StagedRow(key, query);
    }
    if (o.query_position != nullptr) alibi_.Positions(key, query, t.position);
    const auto run = [&](auto partial) HWY_ATTR {
      constexpr bool kPartial = decltype(partial)::value;
      switch (mode_) {
        case FusedMode::kPlain:
          return TransformScores<Variant, FusedMode::kMasked, kPartial>(
              factors_, given_, t, max);
        case FusedMode::kBias:
          return TransformScores<Variant, FusedMode::kBias, kPartial>(
              factors_, given_, t, max);
        case FusedMode::kAlibi:
          return TransformScores<Variant, FusedMode::kAlibi, kPartial>(
              factors_, given_, t, max);
        case FusedMode::kSoftcap:
          return TransformScores<Variant, FusedMode::kSoftcap, kPartial>(
              factors_, given_, t, max);
        default:
          return TransformScores<Variant, FusedMode::kGeneral, kPartial>(
              factors_, given_, t, max);
      }
    };
    if (sub.visible()) {
      run(std::false_type());
    } else {
      run(std::true_type());
    }
  }

  // Nothing has been written to the accumulator of the strip's queries.
  bool Starts(const Strip& strip) const { return b_.first && strip.first; }

  void Ranges(const SubBlock& sub, int64_t query, const float* begin[2],
              const float* end[2]) const {
    for (int half = 0; half < 2; ++half) {
      begin[half] = sub.half[half] == TileState::kHidden ? all_ + 32 : all_;
      end[half] = all_ + 32;
      if (sub.half[half] == TileState::kPartial) {
        begin[half] =
            static_cast<const float*>(b_.score.visible_begin) + 32 * query;
        end[half] =
            static_cast<const float*>(b_.score.visible_end) + 32 * query;
      }
    }
  }

  // O^T += V^T P^T of a strip.
  template <class Side>
  void Values(const Strip& strip, Side& side) {
    const int64_t columns = 2 * vt_;
    uint8_t* const out = OutputPanel(strip.query);
    const bool add = !Starts(strip);
    const StripPairs<kScore> pairs{p_, kTermBytes};
    const uint8_t* const v = static_cast<const uint8_t*>(b_.v_grad) +
                             strip.chunk * columns * kIn * kTileBytes;
    for (int64_t d = 0; d < columns; d += 2) {
      const StripValues<kIn> values{v + d * strip.in_chunk * kTileBytes,
                                    columns * strip.in_chunk * kTileBytes,
                                    strip.in_chunk * kTileBytes, strip};
      ProductOrZero<Variant>(
          values, pairs, 0, strip.count, add,
          {out + 2 * d * kTileBytes, 2 * kTileBytes, kTileBytes}, pending_,
          side);
    }
    Flush();
  }

  const ForwardBlock& b_;
  const int64_t keys_, queries_;  // panels
  const int64_t dt_, vt_;
  const int64_t chunk_;
  uint8_t* s_;
  uint8_t* p_;
  PendingTiles dummy_, pending_;
  float* max_;  // in the unit in which exponentials are taken
  float* all_;
  float* bias_;     // of a sub-block of bias_stream
  uint16_t* keep_;  // of a strip, bits of dropout_stream
  SubBlock* sub_blocks_;
  ScoreFactors factors_;
  FusedMode mode_ = FusedMode::kPlain;
  int given_ = 0;
  float scale_ = 1.0f;  // of seen_
  const DropoutBits dropout_;
  StreamFetch fetch_;           // of bias_stream
  alignas(64) float seen_[32];  // maxima of a strip
  bool kept_ = false;           // they were not looked for
  const AlibiMaxima alibi_;
  alignas(64) float lifted_[32];  // ExpBlock::max with ALiBi
};

template <class Variant>
void Forward(const ForwardBlock& block) {
  switch (amx::DepthTiles(block.head_dim)) {
    case 2:
      return ForwardPass<Variant, 2>(block).Run();
    case 4:
      return ForwardPass<Variant, 4>(block).Run();
    case 8:
      return ForwardPass<Variant, 8>(block).Run();
  }
  ForwardPass<Variant, 0>(block).Run();
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_INL_H_
