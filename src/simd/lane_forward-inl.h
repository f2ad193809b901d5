// The forward pass of a block on vector lanes, with an online softmax over the
// blocks of keys: S^T of a panel of queries, its maxima, P^T, O^T.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_FORWARD_INL_H_
#undef FA2_SRC_SIMD_LANE_FORWARD_INL_H_
#else
#define FA2_SRC_SIMD_LANE_FORWARD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <limits>

#include "hwy/highway.h"
#include "src/simd/lane_products-inl.h"
#include "src/simd/score_arrays-inl.h"
#include "src/simd/score_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class Op>
struct LaneForward : LaneProducts<Op> {
  using Products = LaneProducts<Op>;
  using Products::Packed;
  using Products::PackedScores;
  using Products::Ptr;
  using typename Products::D;
  using typename Products::Element;
  using typename Products::ScoreElement;
  using typename Products::Scores;
  using typename Products::T;

  static void Run(const ForwardBlock& block) {
    const D d;
    const size_t width = PanelWidth(d);
    const size_t head_dim = static_cast<size_t>(block.head_dim);
    const size_t value_dim = static_cast<size_t>(block.value_dim);
    const PanelMap map(block, width);
    T* old_max = Ptr(block.scratch);
    T* factor = old_max + width;
    const ForwardScores<Op> scores(factor + width, width,
                                   static_cast<size_t>(block.keys));
    T* s = scores.s();
    // A scale of 0 would turn the -inf of masked raw scores into NaN, a
    // negative one their maximum into a minimum.
    const bool general = !block.score.plain() || !(block.score.scale > 0.0);
    for (size_t panel = 0; panel < map.panels(); ++panel) {
      const Range keys = map.Keys(panel);
      const size_t column = panel * width;
      T* out = Ptr(block.out) + column * value_dim;
      if (keys.empty()) {
        if (block.first) std::fill_n(out, value_dim * width, T(0));
        continue;
      }
      PassArea area{keys.begin, keys.end, column};
      const PanelOptions<T> options(block.score, area);
      T* row_max = Ptr(block.row_max) + column;
      T* row_sum = Ptr(block.row_sum) + column;
      T* row_weight = block.row_weight == nullptr
                          ? nullptr
                          : Ptr(block.row_weight) + column;
      Products::ScorePanel(
          d, PackedScores(block.k_score),
          PackedScores(block.q_score) + column * Steps<Scores>(head_dim),
          head_dim, Products::ScoreDepthPart(block), keys,
          {block.v_grad, Steps<Op>(static_cast<size_t>(block.keys)) *
                             RowStride(d, value_dim) * sizeof(Element)},
          s + keys.begin * width);
      std::copy_n(row_max, width, old_max);
      for (size_t begin = keys.begin; begin < keys.end; begin += kTileKeys) {
        area.key_begin = begin;
        area.key_end = std::min(begin + kTileKeys, keys.end);
        const TileState state = map.State(begin / kTileKeys, panel);
        if (state == TileState::kHidden) {
          std::fill_n(s + begin * width, (area.key_end - begin) * width,
                      -std::numeric_limits<T>::infinity());
        } else if (state == TileState::kPartial) {
          if (general) {
            ForwardMaxPass<true, true>(d, options, area, s, row_max);
          } else {
            ForwardMaxPass<true, false>(d, options, area, s, row_max);
          }
        } else if (general) {
          ForwardMaxPass<false, true>(d, options, area, s, row_max);
        } else {
          ForwardMaxPass<false, false>(d, options, area, s, row_max);
        }
      }
      ForwardRescale(d, width, old_max, row_max, row_sum, factor);
      if (row_weight != nullptr) {
        for (size_t col = 0; col < width; col += hn::Lanes(d)) {
          hn::Store(
              hn::Mul(hn::Load(d, row_weight + col), hn::Load(d, factor + col)),
              d, row_weight + col);
        }
      }
      area.key_begin = keys.begin;
      area.key_end = keys.end;
      // With dropout the rounding errors of numerator and denominator have
      // nothing in common.
      const bool same_weight = block.score.dropout != nullptr;
      T* weight = same_weight ? nullptr : row_weight;
      if (general) {
        ForwardExpPass<Op, true, true>(d, options, area, scores, row_max,
                                       row_sum, weight);
      } else if (block.tiles != nullptr) {
        ForwardExpPass<Op, false, true>(d, options, area, scores, row_max,
                                        row_sum, weight);
      } else {
        ForwardExpPass<Op, false, false>(d, options, area, scores, row_max,
                                         row_sum, weight);
      }
      if (same_weight && row_weight != nullptr) {
        std::copy_n(row_sum, width, row_weight);
      }
      for (size_t term = 0; term < Op::kTerms; ++term) {
        Products::QueryPanel(
            d, Packed(block.v_grad), scores.p(term), value_dim, keys,
            !block.first || term > 0, term > 0 ? nullptr : factor,
            {PackedScores(block.k_score) + static_cast<size_t>(block.keys) *
                                               ScoreStride<Scores>(d, head_dim),
             static_cast<size_t>(block.keys) *
                 ScoreStride<Scores>(d, head_dim) * sizeof(ScoreElement)},
            out);
      }
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
