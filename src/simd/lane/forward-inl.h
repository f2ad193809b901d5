// SPDX-License-Identifier: Apache-2.0

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
#include "src/simd/lane/forward_sink-inl.h"
#include "src/simd/lane/plain_pass-inl.h"
#include "src/simd/lane/products-inl.h"
#include "src/simd/lane/score_arrays-inl.h"
#include "src/simd/lane/score_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One block of keys against one block of queries.
template <class Op>
class LaneForward : LaneProducts<Op> {
 public:
  using typename LaneProducts<Op>::D;
  using typename LaneProducts<Op>::T;

  // Arrays of W beside the scores in the scratch memory.
  static constexpr size_t kRowArrays = 5;

  static void Run(const ForwardBlock& block) {
    LaneForward run(block);
    const size_t width = PanelWidth(D());
    for (size_t panel = 0; panel < run.map_.panels(); ++panel) {
      Panel p;
      p.index = panel;
      p.keys = run.map_.Keys(panel);
      p.sees_all = run.map_.SeesAll(panel, p.keys);
      p.column = panel * width;
      p.width = run.map_.Width(panel);
      p.row_max = Ptr(block.row_max) + p.column;
      p.row_sum = Ptr(block.row_sum) + p.column;
      p.row_weight = block.row_weight == nullptr
                         ? nullptr
                         : Ptr(block.row_weight) + p.column;
      p.out = Ptr(block.out) + p.column * run.value_dim_;
      if (!p.keys.empty()) {
        run.RunPanel(p);
      } else if (block.first) {
        std::fill_n(p.out, run.value_dim_ * p.width, T(0));
      }
    }
  }

 private:
  using Products = LaneProducts<Op>;
  using Products::Packed;
  using Products::PackedScores;
  using Products::Ptr;
  using typename Products::Element;
  using typename Products::ScoreElement;
  using typename Products::Scores;

  // A panel of queries: the keys that it sees, whether each of its queries sees
  // all of them, and the state of its rows.
  struct Panel {
    size_t index, column, width;
    Range keys;
    bool sees_all;
    T *row_max, *row_sum, *row_weight, *out;
  };

  explicit LaneForward(const ForwardBlock& block)
      : block_(block),
        map_(block, PanelWidth(D()), Op::kPerLane),
        head_dim_(static_cast<size_t>(block.head_dim)),
        value_dim_(static_cast<size_t>(block.value_dim)),
        k_stride_(
            StrideOr(block.k_stride, ScoreStride<Scores>(D(), head_dim_))),
        v_stride_(StrideOr(block.v_stride, RowStride(D(), value_dim_))),
        general_(!block.score.plain() || !(block.score.scale > 0.0)),
        keeps_maxima_(!general_ && map_.keys() % 2 == 0 &&
                      (kPassesFour<Op> || Steps<Scores>(head_dim_) <=
                                              Products::ScoreDepthPart(block))),
        old_max_(Ptr(block.scratch)),
        factor_(old_max_ + PanelWidth(D())),
        shift_(factor_ + PanelWidth(D())),
        sum_(shift_ + PanelWidth(D())),
        weight_(sum_ + PanelWidth(D())),
        scores_(weight_ + PanelWidth(D()), PanelWidth(D()),
                static_cast<size_t>(block.keys)),
        to_memory_(
            block.ahead,
            map_.panels() * RowBlocksOf(static_cast<size_t>(block.keys))) {}

  void RunPanel(const Panel& p) {
    if (keeps_maxima_ && p.sees_all && p.width == PanelWidth(D()) &&
        !Outgrown() && HaveMaxima(p) && ExpWithKeptMaxima(p)) {
      Add(sum_, p.row_sum);
      if (p.row_weight != nullptr) Add(weight_, p.row_weight);
      AddOutput(p, nullptr);
      return;
    }
    std::copy_n(p.row_max, p.width, old_max_);
    ScorePanel(p, to_memory_);
    MaxPass(p, general_);
    bool general = general_;
    if (!general && HasLargeScores(D(), p.row_max, p.width)) {
      general = true;
      std::copy_n(old_max_, p.width, p.row_max);
      MaxPass(p, general);
    }
    Rescale(p);
    ExpPass(p, general);
    AddOutput(p, factor_);
  }

  bool Outgrown() const {
    return block_.outgrown != nullptr && *block_.outgrown;
  }

  // Whether all rows have seen something, and nothing large.
  bool HaveMaxima(const Panel& p) const {
    const D d;
    if (HasLargeScores(d, p.row_max, p.width)) return false;
    for (size_t col = 0; col < p.width; col += hn::Lanes(d)) {
      const auto max = hn::Load(d, p.row_max + col);
      if (!hn::AllTrue(d, hn::Gt(max, hn::Neg(hn::Inf(d))))) return false;
    }
    return true;
  }

  // P and its sums with the maxima of the keys before, from S as it leaves the
  // registers where four vectors abreast are not better. Returns whether the
  // sums show that those maxima served; NaN does not.
  bool ExpWithKeptMaxima(const Panel& p) const {
    const D d;
    const auto most = hn::Set(d, T(kMostOfServing));
    for (size_t col = 0; col < PanelWidth(d); col += hn::Lanes(d)) {
      const auto max = hn::Load(d, p.row_max + col);
      hn::Store(Shift<Op::kForwardExpDegree, false>(d, max), d, shift_ + col);
      hn::Store(hn::Zero(d), d, sum_ + col);
      hn::Store(hn::Zero(d), d, weight_ + col);
    }
    const PanelOptions<T> options(block_.score, Area(p));
    if constexpr (kPassesFour<Op>) {
      ToMemory sink;
      ScorePanel(p, sink);
      PlainForwardPass<Op>(d, options, Area(p), scores_, shift_, sum_, nullptr);
    } else {
      const ForwardSink<Op> sink{options, scores_, shift_,
                                 sum_,    weight_, p.keys.begin};
      ScorePanel(p, sink);
    }
    for (size_t col = 0; col < PanelWidth(d); col += hn::Lanes(d)) {
      if (!hn::AllTrue(d, hn::Le(hn::Load(d, sum_ + col), most))) {
        if (block_.outgrown != nullptr) *block_.outgrown = true;
        return false;
      }
    }
    return true;
  }

  static PassArea Area(const Panel& p) {
    return {p.keys.begin, p.keys.end, p.column, p.width};
  }

  template <class Sink>
  void ScorePanel(const Panel& p, Sink& sink) const {
    const D d;
    Ahead v;
    if (block_.v_stride == 0) {
      v = {block_.v_grad, Steps<Op>(static_cast<size_t>(block_.keys)) *
                              v_stride_ * sizeof(Element)};
    }
    Products::ScorePanel(
        d, PackedScores(block_.k_score), k_stride_,
        PackedScores(block_.q_score) + p.column * Steps<Scores>(head_dim_),
        head_dim_, Products::ScoreDepthPart(block_), p.width, p.keys, v,
        scores_.s() + p.keys.begin * PanelWidth(d), sink);
  }

  // Takes the running maxima on to those of S, which `general` rewrites as it
  // enters the softmax.
  void MaxPass(const Panel& p, bool general) const {
    const D d;
    const size_t width = PanelWidth(d);
    T* const s = scores_.s();
    PassArea area = Area(p);
    const PanelOptions<T> options(block_.score, area);
    for (size_t begin = p.keys.begin; begin < p.keys.end; begin += kTileKeys) {
      area.key_begin = begin;
      area.key_end = std::min<size_t>(begin + kTileKeys, p.keys.end);
      const TileState state = map_.State(begin / kTileKeys, p.index);
      if (state == TileState::kHidden) {
        std::fill_n(s + begin * width, (area.key_end - begin) * width,
                    -std::numeric_limits<T>::infinity());
      } else if (state == TileState::kPartial) {
        if (general) {
          ForwardMaxPass<true, true>(d, options, area, s, p.row_max);
        } else {
          ForwardMaxPass<true, false>(d, options, area, s, p.row_max);
        }
      } else if (general) {
        ForwardMaxPass<false, true>(d, options, area, s, p.row_max);
      } else {
        ForwardMaxPass<false, false>(d, options, area, s, p.row_max);
      }
    }
  }

  // What has been summed so far, to the new maxima.
  void Rescale(const Panel& p) const {
    const D d;
    ForwardRescale(d, p.width, old_max_, p.row_max, p.row_sum, factor_);
    if (p.row_weight == nullptr) return;
    for (size_t col = 0; col < p.width; col += hn::Lanes(d)) {
      hn::Store(
          hn::Mul(hn::Load(d, p.row_weight + col), hn::Load(d, factor_ + col)),
          d, p.row_weight + col);
    }
  }

  // P and its sums from S in memory.
  void ExpPass(const Panel& p, bool general) const {
    const D d;
    const PassArea area = Area(p);
    const PanelOptions<T> options(block_.score, area);
    // With dropout the rounding errors of numerator and denominator have
    // nothing in common.
    const bool same_weight = block_.score.dropout != nullptr;
    T* const weight = same_weight ? nullptr : p.row_weight;
    if (general) {
      ForwardExpPass<Op, true, true>(d, options, area, scores_, p.row_max,
                                     p.row_sum, weight);
    } else if (!p.sees_all) {
      ForwardExpPass<Op, false, true>(d, options, area, scores_, p.row_max,
                                      p.row_sum, weight);
    } else {
      PlainForwardPass<Op>(d, options, area, scores_, p.row_max, p.row_sum,
                           weight);
    }
    if (same_weight && p.row_weight != nullptr) {
      std::copy_n(p.row_sum, p.width, p.row_weight);
    }
  }

  static void Add(const T* HWY_RESTRICT more, T* HWY_RESTRICT sums) {
    const D d;
    for (size_t col = 0; col < PanelWidth(d); col += hn::Lanes(d)) {
      hn::Store(hn::Add(hn::Load(d, sums + col), hn::Load(d, more + col)), d,
                sums + col);
    }
  }

  // O^T = factor O^T + V^T P^T; nullptr for ones.
  void AddOutput(const Panel& p, const T* factor) const {
    const D d;
    Ahead next_k;
    if (block_.k_stride == 0) {
      const size_t k_elements = static_cast<size_t>(block_.keys) * k_stride_;
      next_k = {PackedScores(block_.k_score) + k_elements,
                k_elements * sizeof(ScoreElement)};
    }
    for (size_t term = 0; term < Op::kTerms; ++term) {
      Products::QueryPanel(d, Packed(block_.v_grad), v_stride_, scores_.p(term),
                           value_dim_, p.width, p.keys,
                           !block_.first || term > 0,
                           term > 0 ? nullptr : factor, next_k, p.out);
    }
  }

  const ForwardBlock& block_;
  const PanelMap map_;
  const size_t head_dim_, value_dim_;
  const size_t k_stride_, v_stride_;  // between rows of keys
  // Not plain: a scale of 0 would turn the -inf of masked raw scores into NaN,
  // a negative one their maximum into a minimum.
  const bool general_;
  // The maxima of the keys before may serve. A sink takes sums over the whole
  // depth, of keys in pairs, and of whole panels.
  const bool keeps_maxima_;
  T *old_max_, *factor_, *shift_, *sum_, *weight_;
  ForwardScores<Op> scores_;
  ToMemoryAhead to_memory_;
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
