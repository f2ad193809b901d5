// SPDX-License-Identifier: Apache-2.0

// The backward pass of a block on vector lanes: S^T and dP^T panel by panel (64
// queries at AVX-512), the fused pass over each panel, then dV, dK and dQ^T.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_BACKWARD_INL_H_
#undef FA2_SRC_SIMD_LANE_BACKWARD_INL_H_
#else
#define FA2_SRC_SIMD_LANE_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/lane/plain_pass-inl.h"
#include "src/simd/lane/products-inl.h"
#include "src/simd/lane/score_arrays-inl.h"
#include "src/simd/lane/score_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

template <class Op>
struct LaneBackward : LaneProducts<Op> {
  using Products = LaneProducts<Op>;
  using Products::Packed;
  using Products::PackedScores;
  using Products::Ptr;
  using typename Products::D;
  using typename Products::Element;
  using typename Products::ScoreElement;
  using typename Products::Scores;
  using typename Products::T;

  // The fused pass over `keys` of one panel; hidden groups become zeros.
  static void FusePanel(D d, const BackwardBlock& block, const PanelMap& map,
                        size_t panel, const Range& keys,
                        const BackwardScores<Op>& scores) {
    const size_t width = PanelWidth(d);
    const size_t column = panel * width;
    PassArea area{0, 0, column, map.Width(panel)};
    const PanelOptions<T> options(block.score, area);
    T* ds = block.ds == nullptr
                ? nullptr
                : Ptr(block.ds) +
                      column * static_cast<size_t>(block.score.staged_key_rows);
    BackwardPanel<T> arrays;
    arrays.first_key = keys.begin;
    arrays.lse = Ptr(block.lse) + column;
    arrays.delta = Ptr(block.delta) + column;
    arrays.s = scores.s(panel);
    arrays.dp = scores.dp(panel);
    arrays.ds = ds;
    arrays.alibi_gradient = block.alibi_gradient;
    const bool general = !block.score.plain() || ds != nullptr ||
                         block.alibi_gradient != nullptr ||
                         HasLargeScores(d, arrays.lse, area.width);
    for (size_t begin = keys.begin; begin < keys.end; begin += kTileKeys) {
      area.key_begin = begin;
      area.key_end = std::min<size_t>(begin + kTileKeys, keys.end);
      const TileState state = map.State(begin / kTileKeys, panel);
      if (state == TileState::kHidden) {
        // dV and dK read whole register blocks of rows, also outside the hull.
        scores.Clear(d, panel, area.key_begin, area.key_end);
        if (ds != nullptr) {
          std::fill_n(ds + begin * width, (area.key_end - begin) * width, T(0));
        }
      } else if (state == TileState::kPartial) {
        if (general) {
          BackwardPass<Op, true, true>(d, options, area, arrays, scores);
        } else {
          BackwardPass<Op, true, false>(d, options, area, arrays, scores);
        }
      } else if (general) {
        BackwardPass<Op, false, true>(d, options, area, arrays, scores);
      } else {
        PlainBackwardPass<Op>(d, options, area, arrays, scores);
      }
    }
  }

  static void Run(const BackwardBlock& block) {
    const D d;
    const size_t width = PanelWidth(d);
    const PanelMap map(block, width, Op::kPerLane);
    const size_t keys = map.keys();
    const size_t head_dim = static_cast<size_t>(block.head_dim);
    const size_t value_dim = static_cast<size_t>(block.value_dim);
    const size_t k_stride =
        StrideOr(block.k_score_stride, ScoreStride<Scores>(d, head_dim));
    const size_t v_stride =
        StrideOr(block.v_score_stride, ScoreStride<Scores>(d, value_dim));
    const size_t k_grad_stride =
        StrideOr(block.k_grad_stride, RowStride(d, head_dim));
    const BackwardScores<Op> scores(block.scratch, width,
                                    static_cast<size_t>(block.keys),
                                    map.panels() * width);
    const size_t strip = BackwardScores<Op>::StripKeys(
        keys, (Steps<Scores>(head_dim) + Steps<Scores>(value_dim)) * width *
                  sizeof(ScoreElement));
    ToMemoryAhead to_memory(block.ahead, 2 * map.panels() * RowBlocksOf(keys));
    bool add_to_dq = false;
    for (size_t panel = 0; panel < map.panels(); ++panel) {
      const Range range = map.Keys(panel);
      const size_t column = panel * width;
      const size_t columns = map.Width(panel);
      const ScoreElement* const q =
          PackedScores(block.q_score) + column * Steps<Scores>(head_dim);
      const ScoreElement* const dout =
          PackedScores(block.dout_score) + column * Steps<Scores>(value_dim);
      Ahead next_dout{dout,
                      Steps<Scores>(value_dim) * width * sizeof(ScoreElement)};
      Ahead next_dq;
      if (block.dq != nullptr) {
        next_dq = {Ptr(block.dq) + column * head_dim,
                   head_dim * width * sizeof(T)};
      }
      for (size_t begin = 0; begin < keys; begin += strip) {
        const size_t end = std::min(begin + strip, keys);
        const Range seen{std::max(begin, range.begin),
                         std::min(end, range.end)};
        if (!seen.empty()) {
          const size_t first = (seen.begin - begin) * width;
          Products::ScorePanel(d, PackedScores(block.k_score), k_stride, q,
                               head_dim, Products::ScoreDepthPart(block),
                               columns, seen, next_dout,
                               scores.s(panel) + first, to_memory);
          Products::ScorePanel(d, PackedScores(block.v_score), v_stride, dout,
                               value_dim, Products::kDepthPart, columns, seen,
                               next_dq, scores.dp(panel) + first, to_memory);
          next_dout = next_dq = {};
        }
        FusePanel(d, block, map, panel, {begin, end}, scores);
      }
      if (block.dq != nullptr) {
        const Ahead ahead =
            panel + 1 < map.panels()
                ? Ahead{q + width * Steps<Scores>(head_dim),
                        Steps<Scores>(head_dim) * width * sizeof(ScoreElement)}
                : Ahead{block.dout_grad, std::min(width, value_dim) *
                                             Steps<Op>(map.panels() * width) *
                                             sizeof(Element)};
        if (panel == 0) add_to_dq = block.WaitDq();
        Products::QueryPanel(d, Packed(block.k_grad), k_grad_stride,
                             scores.ds_right(panel), head_dim, columns, range,
                             add_to_dq, nullptr, ahead,
                             Ptr(block.dq) + column * head_dim);
      }
    }
    if (block.dq != nullptr) block.ReleaseDq();
    if (block.dv != nullptr) {
      for (size_t term = 0; term < Op::kTerms; ++term) {
        Products::KeyGradient(
            d, block, map, scores.p(term), Packed(block.dout_grad), value_dim,
            block.add_to_dv || term > 0,
            {block.q_grad, std::min(width, head_dim) *
                               Steps<Op>(map.panels() * width) *
                               sizeof(Element)},
            Ptr(block.dv));
      }
    }
    if (block.dk != nullptr) {
      Products::KeyGradient(
          d, block, map, scores.ds(), Packed(block.q_grad), head_dim,
          block.add_to_dk,
          {PackedScores(block.q_score) +
               map.panels() * width * Steps<Scores>(head_dim),
           width * Steps<Scores>(head_dim) * sizeof(ScoreElement)},
          Ptr(block.dk));
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
