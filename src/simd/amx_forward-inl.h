// The forward pass of a block on AMX, with an online softmax.
//
// For 32 queries at a time, keys go by strips of 128 (a head dim of 256: 256):
// S^T of the strip (16 KiB, in L1 beside P), its row maxima, the exponentials
// (P as right operand, taken while the tile unit computes S of the next strip),
// O^T += V^T P^T.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_INL_H_

#include "src/simd/amx_forward_scores-inl.h"
#include "src/simd/amx_stream-inl.h"
#include "src/simd/amx_visibility.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

inline constexpr int64_t kMostStripPanels = 8;

// Up to kMostStripPanels sub-blocks of one query panel, none of them hidden,
// within one chunk of keys.
struct Strip {
  int64_t query = -1;  // panel, -1: no strip
  int64_t chunk = 0;   // first key panel of the chunk
  int64_t in_chunk = 0;
  int64_t count = 0;
  int64_t key[kMostStripPanels] = {};  // panels
};

// V^T as left operand over a strip's keys: i is the 16 columns of V, k indexes
// the strip.
template <int kTermCount>
struct StripValues {
  static constexpr int kTerms = kTermCount;
  const uint8_t* base;  // of the chunk and the first column tile
  int64_t term_bytes;
  int64_t column_bytes;
  const Strip& strip;
  template <class Tiles, int kRegister>
  HWY_INLINE void Load(int term, int64_t i, int64_t k) const {
    Tiles::template LoadStreaming<kRegister>(
        base + term * term_bytes + i * column_bytes +
            (strip.key[k] - strip.chunk) * kTileBytes,
        64);
  }
};

// P of a strip as right operand: i is the query half.
template <int kTermCount>
struct StripPairs {
  static constexpr int kTerms = kTermCount;
  const uint8_t* base;
  int64_t term_bytes;
  template <class Tiles, int kRegister>
  HWY_INLINE void Load(int term, int64_t i, int64_t k) const {
    Tiles::template Load<kRegister>(
        base + term * term_bytes + (2 * k + i) * kTileBytes, 64);
  }
};

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

 public:
  // Bytes of scratch for `keys` x `queries`, both in panels.
  static int64_t ScratchBytes(int64_t keys, int64_t queries) {
    return kStripPanels * 4 * kTileBytes + kTermBytes * kScore + kTileBytes +
           4 * 128 + kStreamElements * 4 +
           (keys * queries * int64_t{sizeof(SubBlock)} + 63) / 64 * 64;
  }

  explicit ForwardPass(const ForwardBlock& block)
      : b_(block),
        keys_(block.keys / 32),
        queries_(block.queries / 32),
        dt_(amx::DepthTiles(block.head_dim)),
        vt_(amx::DepthTiles(block.value_dim)),
        chunk_(amx::ChunkPanels(block.value_dim)) {
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
    sub_blocks_ = reinterpret_cast<SubBlock*>(p);
  }

  void Run() {
    const ScoreOptions& o = b_.score;
    // A negative scale turns maxima of products into minima.
    const int options = GivenOptions(o) & (kHasBias | kHasAlibi | kHasSoftcap);
    mode_ = o.scale > 0.0 ? ModeOf(options) : FusedMode::kGeneral;
    transforms_ = mode_ != FusedMode::kPlain;
    given_ = options;
    factors_ = ScoreFactors(o, 1.0);
    scale_ = transforms_ ? 1.0f : static_cast<float>(o.scale);
    for (int i = 0; i < 32; ++i) {
      all_[i] = -HUGE_VALF;
      all_[32 + i] = HUGE_VALF;
    }
    ClassifySubBlocks(b_, queries_, sub_blocks_);
    Tiles::Begin();
    pending_ = dummy_;
    if (transforms_) {
      Strips<true>();
    } else {
      Strips<false>();
    }
    Tiles::End();
  }

 private:
  struct Cursor {
    int64_t query = 0;
    int64_t key = 0;
    bool started = false;  // a strip of the query panel has been given out
  };

  const SubBlock& At(int64_t key, int64_t query) const {
    return sub_blocks_[key * queries_ + query];
  }
  uint8_t* OutputPanel(int64_t query) const {
    return static_cast<uint8_t*>(b_.out) + query * vt_ * 4 * kTileBytes;
  }

  // The next strip; clears the accumulators of query panels that see nothing.
  void NextStrip(Cursor& cursor, Strip& strip) const {
    strip = Strip();
    for (; cursor.query < queries_; ++cursor.query, cursor.key = 0) {
      while (cursor.key < keys_ && strip.count < kStripPanels) {
        if (strip.count > 0 && cursor.key % chunk_ == 0) break;
        if (!At(cursor.key, cursor.query).hidden()) {
          strip.chunk = cursor.key / chunk_ * chunk_;
          strip.key[strip.count++] = cursor.key;
        }
        ++cursor.key;
      }
      if (strip.count > 0) {
        strip.query = cursor.query;
        strip.in_chunk = std::min(chunk_, keys_ - strip.chunk);
        cursor.started = true;
        return;
      }
      if (b_.first && !cursor.started) {
        std::memset(OutputPanel(cursor.query), 0, vt_ * 4 * kTileBytes);
      }
      cursor.started = false;
    }
  }

  template <bool kNatural>
  void Strips() {
    Strip current, next;
    Cursor cursor;
    const Strip none;
    NextStrip(cursor, current);
    if (current.query >= 0) {
      Scores<kNatural>(current, none);
      Maxima(current);
    }
    while (current.query >= 0) {
      NextStrip(cursor, next);
      Scores<kNatural>(next, current);
      Values(current);
      if (next.query >= 0) Maxima(next);
      current = next;
    }
  }

  uint8_t* ScoreTile(int64_t i) const { return s_ + i * 4 * kTileBytes; }

  // S of `next`, and P of `current` meanwhile; each of them may be no strip.
  // They share the buffer of S: a sub-block of `next` arrives where one of
  // `current` has just been read.
  template <bool kNatural>
  void Scores(const Strip& next, const Strip& current) {
    ExpState state;
    alignas(64) float sum[32] = {};
    state.scale = scale_ * kLog2OfE;
    state.kept = factors_.kept;
    state.max = max_;
    state.sum = sum;
    state.term_bytes = kTermBytes;
    const int64_t panel = 2 * dt_ * kIn * kTileBytes;
    const int64_t count = std::max(next.count, current.count);
    for (int64_t i = 0; i < count; ++i) {
      ExpBlock e;
      if (i < current.count) {
        e.s = ScoreTile(i);
        e.p = p_ + i * 2 * kTileBytes;
        if (b_.score.dropout != nullptr) {
          e.keep = static_cast<const uint16_t*>(b_.score.dropout) +
                   2 * StagedRow(current.key[i], current.query);
        }
      }
      if (i < next.count) {
        if (kNatural && b_.score.bias_stream.given()) {
          FetchPart<false>(b_.score.bias_stream, next.key[i], next.query);
        }
        ForwardScoreStep<Variant, kSteps, kNatural>(
            static_cast<const uint8_t*>(b_.k_score) + next.key[i] * panel,
            static_cast<const uint8_t*>(b_.q_score) + next.query * panel, dt_,
            {ScoreTile(i), 2 * kTileBytes, kTileBytes}, pending_, state, e);
      } else {
        if (i == next.count) Flush();
        ExpAll<Variant, kNatural>(state, e);
      }
    }
    if (next.count >= current.count) Flush();
    if (current.query >= 0) {
      float* l = static_cast<float*>(b_.row_sum) + 32 * current.query;
      for (int i = 0; i < 32; ++i) l[i] += sum[i];
    }
    Tiles::Fence();
  }

  void Flush() {
    StorePending<Tiles>(pending_);
    pending_ = dummy_;
  }

  // Masks and transforms S of a strip, moves the running maxima on and scales
  // what has been summed so far. A maximum stays where it is until the scores
  // exceed it by 5.5 (P <= 2^8): any reference serves as well, and the
  // accumulator is seldom scaled.
  void Maxima(const Strip& strip) {
    const int64_t query = strip.query;
    const __m512 none = _mm512_set1_ps(-HUGE_VALF);
    __m512 max[4] = {none, none, none, none};
    for (int64_t i = 0; i < strip.count; ++i) {
      const SubBlock& sub = At(strip.key[i], query);
      if (!transforms_ && sub.visible()) {
        ColumnMaxima(ScoreTile(i), max);
      } else {
        Transform(sub, ScoreTile(i), strip.key[i], query, max);
      }
    }
    float* m = static_cast<float*>(b_.row_max) + 32 * query;
    float* l = static_cast<float*>(b_.row_sum) + 32 * query;
    __m512 alpha[2];
    bool scaled = false;
    for (int h = 0; h < 2; ++h) {
      const __m512 old = _mm512_loadu_ps(m + 16 * h);
      const __m512 seen = _mm512_mul_ps(
          _mm512_max_ps(max[2 * h], max[2 * h + 1]), _mm512_set1_ps(scale_));
      const __mmask16 raise = _mm512_cmp_ps_mask(
          seen, _mm512_add_ps(old, _mm512_set1_ps(5.5f)), _CMP_GT_OQ);
      const __m512 now = _mm512_mask_mov_ps(old, raise, seen);
      const __m512 one = _mm512_set1_ps(1.0f);
      alpha[h] = _mm512_mask_mov_ps(
          one, raise,
          Exp2<6>(_mm512_mul_ps(_mm512_sub_ps(old, now),
                                _mm512_set1_ps(1.44269504f))));
      scaled |= raise != 0;
      _mm512_storeu_ps(m + 16 * h, now);
      _mm512_storeu_ps(l + 16 * h,
                       _mm512_mul_ps(_mm512_loadu_ps(l + 16 * h), alpha[h]));
      // Queries that have seen nothing: exp2(-inf - 0) = 0.
      const __mmask16 seen_any =
          _mm512_cmp_ps_mask(now, _mm512_set1_ps(-HUGE_VALF), _CMP_NEQ_UQ);
      _mm512_storeu_ps(
          max_ + 16 * h,
          _mm512_maskz_mul_ps(seen_any, now,
                              _mm512_set1_ps(transforms_ ? 1.0f : kLog2OfE)));
    }
    if (scaled && !Starts(strip)) Rescale(OutputPanel(query), alpha);
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
    for (int i = 0; i < 32; ++i) {
      t.position[i] =
          o.query_position == nullptr
              ? 0.0f
              : static_cast<const float*>(o.query_position)[32 * query + i] -
                    static_cast<float>(t.key);
    }
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
  bool Starts(const Strip& strip) const {
    if (!b_.first) return false;
    for (int64_t key = 0; key < strip.key[0]; ++key) {
      if (!At(key, strip.query).hidden()) return false;
    }
    return true;
  }

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

  void Rescale(uint8_t* out, const __m512 alpha[2]) const {
    // QueryOfLane.
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17,
                                            18, 19, 24, 25, 26, 27);
    const __m512 by_half[2] = {
        _mm512_permutex2var_ps(alpha[0], lanes, alpha[1]),
        _mm512_permutex2var_ps(
            alpha[0], _mm512_add_epi32(lanes, _mm512_set1_epi32(4)), alpha[1])};
    for (int64_t tile = 0; tile < 4 * vt_; ++tile) {
      float* t = reinterpret_cast<float*>(out + tile * kTileBytes);
      for (int row = 0; row < 16; ++row) {
        _mm512_store_ps(
            t + 16 * row,
            _mm512_mul_ps(_mm512_load_ps(t + 16 * row), by_half[tile % 2]));
      }
    }
    Tiles::Fence();
  }

  // O^T += V^T P^T of a strip.
  void Values(const Strip& strip) {
    const int64_t columns = 2 * vt_;
    uint8_t* const out = OutputPanel(strip.query);
    const bool add = !Starts(strip);
    const StripPairs<kScore> pairs{p_, kTermBytes};
    NoSideWork side;
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
  float* bias_;  // of a sub-block of bias_stream
  SubBlock* sub_blocks_;
  ScoreFactors factors_;
  FusedMode mode_ = FusedMode::kPlain;
  int given_ = 0;
  bool transforms_ = false;  // S in place, so that scale_ is 1
  float scale_ = 1.0f;
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
