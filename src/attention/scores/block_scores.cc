// SPDX-License-Identifier: Apache-2.0
#include "src/attention/scores/block_scores.h"

#include <algorithm>

namespace fa2::attention {

simd::StagedShape StagedShapeOf(const PairRows& pair,
                                const simd::Engine& engine) {
  return {pair.queries.size(), pair.keys.size(), pair.queries.padded,
          pair.keys.padded, engine.query_panel};
}

BlockScores::BlockScores(const Problem& problem, const simd::Engine& engine,
                         const simd::StagingKernels& staging,
                         const BiasTiles& bias_tiles,
                         const AlibiReach& alibi_reach,
                         const simd::BlockSizes& largest,
                         bool want_alibi_gradient,
                         threading::ScratchLayout* layout)
    : problem_(problem),
      engine_(engine),
      staging_(staging),
      bias_tiles_(bias_tiles),
      alibi_reach_(alibi_reach),
      block_tiles_(problem, largest, layout),
      positions_(problem.options.alibi_slopes.given() || want_alibi_gradient),
      tile_stride_(CeilDiv(largest.queries, simd::kTileQueries) + 1),
      stream_dropout_(engine.streams_scores) {
  const size_t element = SizeOf(engine.accumulator);
  const size_t queries = static_cast<size_t>(largest.queries);
  const size_t scores = queries * static_cast<size_t>(largest.keys) * element;
  tiles_ = layout->Take<simd::TileState>(static_cast<size_t>(
      tile_stride_ * (CeilDiv(largest.keys, simd::kTileKeys) + 1)));
  visible_begin_ = layout->Take(queries * element);
  visible_end_ = layout->Take(queries * element);
  position_ = layout->Take(positions_ ? queries * element : 0);
  if (problem.options.bias.given() && !engine.streams_scores) {
    bias_.emplace(problem, engine, staging, largest, layout);
  }
  if (problem.options.dropout_p > 0.0) {
    dropout_ =
        layout->Take(engine.dropout_bits ? scores / (8 * element) : scores);
  }
}

BlockScores::TileSum BlockScores::FindTiles(const PairRows& pair, bool in_range,
                                            bool reach_ends, bool listed) {
  using simd::TileState;
  const Mask& mask = problem_.sequences[pair.queries.sequence].mask;
  const int64_t columns = CeilDiv(pair.queries.padded, simd::kTileQueries);
  const int64_t counted = RoundUp(pair.keys.size(), engine_.key_step);
  const int64_t rows = CeilDiv(counted, simd::kTileKeys);
  // Columns of tiles in one panel, of which the engine looks at a state for
  // all.
  const int64_t of_panel =
      std::max<int64_t>(1, engine_.query_panel / simd::kTileQueries);
  const TileState* of_neighbour = nullptr;
  TileSum sum;
  for (int64_t c = 0; c < columns; ++c) {
    const int64_t q = pair.queries.begin() + c * simd::kTileQueries;
    const Interval queries = {
        q, std::min(q + simd::kTileQueries, pair.queries.rows.end)};
    const bool by_bias = bias_tiles_.known() && !queries.empty();
    const TileState* const of_bias =
        by_bias ? bias_tiles_.Row(pair.queries.sequence, pair.queries.head, q)
                : nullptr;
    if (c % of_panel == 0) of_neighbour = nullptr;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t k = pair.keys.begin() + r * simd::kTileKeys;
      TileState state =
          in_range && !queries.empty()
              ? TileState::kVisible
              : mask.State(queries, {k, std::min(k + simd::kTileKeys,
                                                 pair.keys.begin() + counted)});
      // Tiles of padding are hidden already.
      if (listed && state != TileState::kHidden) {
        state = std::min(state, tiles_[r * tile_stride_ + c]);
      }
      if (of_bias != nullptr && state != TileState::kHidden) {
        const TileState shown = of_bias[k / simd::kTileKeys];
        if (shown == TileState::kHidden) state = shown;
        sum.some_by_bias |= shown == TileState::kPartial;
        // A panel of hidden and visible tiles is looked at element by element.
        if (of_neighbour != nullptr) {
          sum.some_by_bias |= shown != of_neighbour[k / simd::kTileKeys];
        }
        if (MasksByTiles()) state = std::min(state, shown);
      }
      if (reach_ends && state != TileState::kHidden &&
          alibi_reach_.Hides(pair.queries.sequence, pair.queries.head, q, k)) {
        state = TileState::kHidden;
      }
      tiles_[r * tile_stride_ + c] = state;
      sum.all_visible &= state == TileState::kVisible;
      sum.hidden &= state == TileState::kHidden;
    }
    of_neighbour = of_bias;
  }
  return sum;
}

simd::PrefetchRows BlockScores::BiasAhead(const PairRows& next) const {
  const Interval& queries = next.queries.rows;
  const Interval& keys = next.keys.rows;
  if (queries.empty() || keys.empty()) return {};
  const Sequence& sequence = problem_.sequences[next.queries.sequence];
  if (sequence.mask.State(queries, keys) == simd::TileState::kHidden) {
    return {};
  }
  const simd::ScoreMatrix bias =
      MatrixOf(problem_.options.bias, sequence.batch, next.queries.head,
               queries.begin, keys.begin);
  if (bias.key_stride != 1 || bias.query_stride == 0) return {};
  const int64_t element = static_cast<int64_t>(SizeOf(bias.dtype));
  return {static_cast<const char*>(bias.data), bias.query_stride * element,
          queries.size(), keys.size() * element};
}

template <typename T>
bool BlockScores::PrepareAs(const PairRows& pair, const PairRows& next,
                            simd::Block* block) {
  const Sequence& sequence = problem_.sequences[pair.queries.sequence];
  const Mask& mask = sequence.mask;
  const AttentionOptions& options = problem_.options;
  const int64_t k0 = pair.keys.begin();
  block->keys = pair.keys.padded;
  block->queries = pair.queries.padded;
  block->used_keys = pair.keys.size();
  block->used_queries = pair.queries.size();
  block->head_dim = problem_.head_dim;
  block->value_dim = problem_.value_dim;
  block->tiles = nullptr;
  simd::ScoreOptions& score = block->score;
  score = simd::ScoreOptions();
  score.scale = problem_.scale;
  score.softcap = options.softcap;
  score.staged_key_rows = pair.keys.padded;
  block->ahead = {};

  // Most blocks of a long sequence are all visible: one look settles them.
  const simd::TileState whole =
      mask.State(pair.queries.rows,
                 {k0, k0 + RoundUp(pair.keys.size(), engine_.key_step)});
  if (whole == simd::TileState::kHidden) return false;
  const simd::TileState listed =
      block_tiles_.given() ? block_tiles_.Find(pair, tiles_, tile_stride_)
                           : simd::TileState::kVisible;
  if (listed == simd::TileState::kHidden) return false;
  const bool mixed = listed == simd::TileState::kPartial;
  bool bias_matters = options.bias.given();
  const bool reach_ends = alibi_reach_.MayHide(pair);
  if (whole != simd::TileState::kVisible || mixed || bias_tiles_.known() ||
      reach_ends) {
    const TileSum sum =
        FindTiles(pair, whole == simd::TileState::kVisible, reach_ends, mixed);
    if (sum.hidden) return false;
    bias_matters &= !bias_tiles_.is_mask() || sum.some_by_bias;
    if (!sum.all_visible) {
      block->tiles = tiles_;
      block->tile_stride = tile_stride_;
      T* begin = static_cast<T*>(visible_begin_);
      T* end = static_cast<T*>(visible_end_);
      for (int64_t i = 0; i < pair.queries.padded; ++i) {
        Interval keys;
        if (i < pair.queries.size()) {
          keys = mask.Keys(pair.queries.begin() + i);
        }
        begin[i] = static_cast<T>(
            std::clamp<int64_t>(keys.begin - k0, 0, pair.keys.padded));
        end[i] = static_cast<T>(
            std::clamp<int64_t>(keys.end - k0, 0, pair.keys.padded));
      }
      score.visible_begin = begin;
      score.visible_end = end;
      if (mixed) {
        score.visible_bits = block_tiles_.bits();
        score.visible_bits_stride = pair.queries.padded;
      }
    }
  }
  if (positions_) {
    T* position = static_cast<T*>(position_);
    const int64_t shift = mask.nk() - mask.nq() - k0 + pair.queries.begin();
    for (int64_t i = 0; i < pair.queries.padded; ++i) {
      position[i] = static_cast<T>(shift + i);
    }
    score.alibi_slope =
        AlibiSlope(problem_, pair.queries.sequence, pair.queries.head);
    score.query_position = position;
  }
  if (bias_matters) {
    const simd::ScoreMatrix matrix =
        MatrixOf(options.bias, sequence.batch, pair.queries.head,
                 pair.queries.begin(), k0);
    if (MasksByTiles()) {
      score.mask_stream = {&staging_, matrix, pair.queries.size(),
                           pair.keys.size(), false};
    } else if (engine_.streams_scores) {
      score.bias_stream = {&staging_, matrix, pair.queries.size(),
                           pair.keys.size(), false};
      // What the scan has not told. Tiles that it has were looked at.
      if (!bias_tiles_.known() &&
          !AnyVisible(matrix, StagedShapeOf(pair, engine_))) {
        return false;
      }
    } else {
      score.bias = bias_->Of(pair, matrix, StagedShapeOf(pair, engine_));
      if (score.bias == nullptr) return false;
      if (bias_->forgets()) block->ahead.Add(BiasAhead(next));
    }
  }
  if (dropout_ != nullptr) {
    simd::DropoutBlock dropout;
    dropout.p = options.dropout_p;
    dropout.scale = problem_.dropout_scale;
    dropout.seed = options.philox_seed;
    const uint64_t batch_head =
        static_cast<uint64_t>(pair.queries.sequence) * problem_.q_heads +
        pair.queries.head;
    dropout.query_stride = static_cast<uint64_t>(problem_.max_nk);
    dropout.first = options.philox_offset +
                    (batch_head * problem_.max_nq + pair.queries.begin()) *
                        dropout.query_stride +
                    k0;
    if (stream_dropout_ &&
        dropout.by_lanes(pair.queries.size(), pair.keys.size())) {
      score.dropout_stream = dropout;
      score.dropout_scale = dropout.scale;
      return true;
    }
    const auto stage = engine_.dropout_bits ? staging_.stage_dropout_bits
                                            : staging_.stage_dropout;
    stage(dropout, StagedShapeOf(pair, engine_), dropout_);
    score.dropout = dropout_;
    score.dropout_scale = dropout.scale;
  }
  return true;
}

bool BlockScores::Prepare(const PairRows& pair, const PairRows& next,
                          simd::Block* block) {
  return engine_.accumulator == DType::kF64
             ? PrepareAs<double>(pair, next, block)
             : PrepareAs<float>(pair, next, block);
}

}  // namespace fa2::attention
