#include "src/attention/scores/block_scores.h"

#include <algorithm>

namespace fa2::attention {
BlockScores::BlockScores(const Problem& problem, const simd::Engine& engine,
                         const simd::StagingKernels& staging,
                         const BiasTiles& bias_tiles,
                         const AlibiReach& alibi_reach,
                         const simd::BlockSizes& largest,
                         bool want_alibi_gradient, Carver* carver)
    : problem_(problem),
      engine_(engine),
      staging_(staging),
      bias_tiles_(bias_tiles),
      alibi_reach_(alibi_reach),
      positions_(problem.options.alibi_slopes.given() || want_alibi_gradient),
      tile_stride_(CeilDiv(largest.queries, simd::kTileQueries) + 1),
      stream_dropout_(engine.streams_scores) {
  const size_t element = SizeOf(engine.accumulator);
  const size_t queries = static_cast<size_t>(largest.queries);
  const size_t scores = queries * static_cast<size_t>(largest.keys) * element;
  tiles_ = carver->Take<simd::TileState>(static_cast<size_t>(
      tile_stride_ * (CeilDiv(largest.keys, simd::kTileKeys) + 1)));
  visible_begin_ = carver->Take(queries * element);
  visible_end_ = carver->Take(queries * element);
  position_ = carver->Take(positions_ ? queries * element : 0);
  if (problem.options.bias.given() && !engine.streams_scores) {
    bias_ = carver->Take(scores);
  }
  if (problem.options.dropout_p > 0.0) {
    dropout_ =
        carver->Take(engine.dropout_bits ? scores / (8 * element) : scores);
  }
}

simd::StagedShape BlockScores::Shape(const BlockPlace& place) const {
  return {place.queries.size(), place.keys.size(), place.padded_queries,
          place.padded_keys, engine_.query_panel};
}

BlockScores::TileSum BlockScores::FindTiles(const BlockPlace& place,
                                            bool in_range, bool reach_ends) {
  using simd::TileState;
  const Mask& mask = problem_.sequences[place.sequence].mask;
  const int64_t columns = CeilDiv(place.padded_queries, simd::kTileQueries);
  const int64_t rows = CeilDiv(place.padded_keys, simd::kTileKeys);
  TileSum sum;
  for (int64_t c = 0; c < columns; ++c) {
    const int64_t q = place.queries.begin + c * simd::kTileQueries;
    const Interval queries = {
        q, std::min(q + simd::kTileQueries, place.queries.end)};
    const bool by_bias = bias_tiles_.known() && !queries.empty();
    const TileState* const of_bias =
        by_bias ? bias_tiles_.Row(place.sequence, place.head, q) : nullptr;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t k = place.keys.begin + r * simd::kTileKeys;
      TileState state = in_range && !queries.empty()
                            ? TileState::kVisible
                            : mask.State(queries, {k, k + simd::kTileKeys});
      if (of_bias != nullptr && state != TileState::kHidden) {
        const TileState shown = of_bias[k / simd::kTileKeys];
        if (shown == TileState::kHidden) state = shown;
        sum.some_by_bias |= shown == TileState::kPartial;
        if (MasksByTiles()) state = std::min(state, shown);
      }
      if (reach_ends && state != TileState::kHidden &&
          alibi_reach_.Hides(place.sequence, place.head, q, k)) {
        state = TileState::kHidden;
      }
      tiles_[r * tile_stride_ + c] = state;
      sum.all_visible &= state == TileState::kVisible;
      sum.hidden &= state == TileState::kHidden;
    }
  }
  return sum;
}

simd::RowsAhead BlockScores::BiasAhead(const BlockPlace& place) const {
  const Interval& queries = place.next_queries;
  const Interval& keys = place.next_keys;
  const Sequence& sequence = problem_.sequences[place.sequence];
  if (queries.empty() || keys.empty() ||
      sequence.mask.State(queries, keys) == simd::TileState::kHidden) {
    return {};
  }
  const simd::ScoreMatrix next =
      MatrixOf(problem_.options.bias, sequence.batch, place.next_head,
               queries.begin, keys.begin);
  if (next.key_stride != 1 || next.query_stride == 0) return {};
  const int64_t element = static_cast<int64_t>(SizeOf(next.dtype));
  return {static_cast<const char*>(next.data), next.query_stride * element,
          queries.size(), keys.size() * element};
}

template <typename T>
bool BlockScores::PrepareAs(const BlockPlace& place, simd::Block* block) {
  const Sequence& sequence = problem_.sequences[place.sequence];
  const Mask& mask = sequence.mask;
  const AttentionOptions& options = problem_.options;
  const int64_t k0 = place.keys.begin;
  block->keys = place.padded_keys;
  block->queries = place.padded_queries;
  block->head_dim = problem_.head_dim;
  block->value_dim = problem_.value_dim;
  block->tiles = nullptr;
  simd::ScoreOptions& score = block->score;
  score = simd::ScoreOptions();
  score.scale = problem_.scale;
  score.softcap = options.softcap;
  score.staged_key_rows = place.padded_keys;

  // Most blocks of a long sequence are all visible: one look settles them.
  const simd::TileState whole =
      mask.State(place.queries, {k0, k0 + place.padded_keys});
  if (whole == simd::TileState::kHidden) return false;
  bool bias_matters = options.bias.given();
  const bool reach_ends = alibi_reach_.MayHide(place.sequence, place.head,
                                               place.queries, place.keys);
  if (whole != simd::TileState::kVisible || bias_tiles_.known() || reach_ends) {
    const TileSum sum =
        FindTiles(place, whole == simd::TileState::kVisible, reach_ends);
    if (sum.hidden) return false;
    bias_matters &= !bias_tiles_.is_mask() || sum.some_by_bias;
    if (!sum.all_visible) {
      block->tiles = tiles_;
      block->tile_stride = tile_stride_;
      T* begin = static_cast<T*>(visible_begin_);
      T* end = static_cast<T*>(visible_end_);
      for (int64_t i = 0; i < place.padded_queries; ++i) {
        Interval keys;
        if (i < place.queries.size()) {
          keys = mask.Keys(place.queries.begin + i);
        }
        begin[i] = static_cast<T>(
            std::clamp<int64_t>(keys.begin - k0, 0, place.padded_keys));
        end[i] = static_cast<T>(
            std::clamp<int64_t>(keys.end - k0, 0, place.padded_keys));
      }
      score.visible_begin = begin;
      score.visible_end = end;
    }
  }
  if (positions_) {
    T* position = static_cast<T*>(position_);
    const int64_t shift = mask.nk() - mask.nq() - k0 + place.queries.begin;
    for (int64_t i = 0; i < place.padded_queries; ++i) {
      position[i] = static_cast<T>(shift + i);
    }
    score.alibi_slope = AlibiSlope(problem_, place.sequence, place.head);
    score.query_position = position;
  }
  if (bias_matters) {
    const simd::ScoreMatrix matrix = MatrixOf(
        options.bias, sequence.batch, place.head, place.queries.begin, k0);
    if (MasksByTiles()) {
      score.mask_stream = {&staging_, matrix, place.queries.size(),
                           place.keys.size(), false};
    } else if (engine_.streams_scores) {
      score.bias_stream = {&staging_, matrix, place.queries.size(),
                           place.keys.size(), false};
      // What the scan has not told. Tiles that it has were looked at.
      if (!bias_tiles_.known() && !AnyVisible(matrix, Shape(place))) {
        return false;
      }
    } else {
      if (!staging_.stage_bias(matrix, Shape(place), bias_)) return false;
      score.bias = bias_;
      score.bias_ahead = BiasAhead(place);
    }
  }
  if (dropout_ != nullptr) {
    simd::DropoutBlock dropout;
    dropout.p = options.dropout_p;
    dropout.scale = problem_.dropout_scale;
    dropout.seed = options.philox_seed;
    const uint64_t batch_head =
        static_cast<uint64_t>(place.sequence) * problem_.q_heads + place.head;
    dropout.query_stride = static_cast<uint64_t>(problem_.max_nk);
    dropout.first = options.philox_offset +
                    (batch_head * problem_.max_nq + place.queries.begin) *
                        dropout.query_stride +
                    k0;
    if (stream_dropout_ &&
        dropout.by_lanes(place.queries.size(), place.keys.size())) {
      score.dropout_stream = dropout;
      score.dropout_scale = dropout.scale;
      return true;
    }
    const auto stage = engine_.dropout_bits ? staging_.stage_dropout_bits
                                            : staging_.stage_dropout;
    stage(dropout, Shape(place), dropout_);
    score.dropout = dropout_;
    score.dropout_scale = dropout.scale;
  }
  return true;
}

bool BlockScores::Prepare(const BlockPlace& place, simd::Block* block) {
  return engine_.accumulator == DType::kF64 ? PrepareAs<double>(place, block)
                                            : PrepareAs<float>(place, block);
}

}  // namespace fa2::attention
