// The engines made of vector lanes: F32Fma, its double, F64, and Bf16Dot, whose
// lanes hold pairs.
//
// Per block: S^T and dP^T panel by panel (64 queries at AVX-512), the fused
// pass over each panel, then dV, dK and dQ^T. With one element a lane P and dS
// stay in the panel layout [panel][key][W], which is the left operand (by rows)
// of dV and dK and the right operand of dQ^T at once.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_ENGINE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_ENGINE_INL_H_
#undef FA2_SRC_SIMD_LANE_ENGINE_INL_H_
#else
#define FA2_SRC_SIMD_LANE_ENGINE_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "hwy/highway.h"
#include "src/simd/engine.h"
#include "src/simd/pack-inl.h"
#include "src/simd/register_block-inl.h"
#include "src/simd/score_arrays-inl.h"
#include "src/simd/score_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Half-open range of rows, columns or panels.
struct Range {
  size_t begin = 0;
  size_t end = 0;
  bool empty() const { return begin >= end; }
};

// Which parts of a block are visible, in units of (16 keys, one panel).
class PanelMap {
 public:
  PanelMap(const Block& block, size_t panel_width)
      : block_(block),
        width_(panel_width),
        groups_((static_cast<size_t>(block.keys) + kTileKeys - 1) / kTileKeys),
        panels_(static_cast<size_t>(block.queries) / panel_width) {}

  size_t groups() const { return groups_; }
  size_t panels() const { return panels_; }

  TileState State(size_t group, size_t panel) const {
    if (block_.tiles == nullptr) return TileState::kVisible;
    const size_t first = panel * width_ / kTileQueries;
    const size_t last = ((panel + 1) * width_ - 1) / kTileQueries;
    const TileState* row = block_.tiles + group * block_.tile_stride;
    const TileState state = row[first];
    for (size_t tile = first + 1; tile <= last; ++tile) {
      if (row[tile] != state) return TileState::kPartial;
    }
    return state;
  }

  // Hull of the key rows that a panel sees.
  Range Keys(size_t panel) const {
    const auto hidden = [&](size_t g) {
      return State(g, panel) == TileState::kHidden;
    };
    const size_t keys = static_cast<size_t>(block_.keys);
    if (block_.tiles == nullptr) return {0, keys};
    Range range{0, groups_};
    while (!range.empty() && hidden(range.begin)) ++range.begin;
    while (!range.empty() && hidden(range.end - 1)) --range.end;
    return {range.begin * kTileKeys, std::min(range.end * kTileKeys, keys)};
  }

  // Hull of the panels that see any of the key rows [begin, end).
  Range Panels(size_t begin, size_t end) const {
    if (block_.tiles == nullptr) return {0, panels_};
    const size_t first = begin / kTileKeys;
    const size_t last = (end - 1) / kTileKeys;
    const auto hidden = [&](size_t panel) {
      for (size_t g = first; g <= last; ++g) {
        if (State(g, panel) != TileState::kHidden) return false;
      }
      return true;
    };
    Range range{0, panels_};
    while (!range.empty() && hidden(range.begin)) ++range.begin;
    while (!range.empty() && hidden(range.end - 1)) --range.end;
    return range;
  }

 private:
  const Block& block_;
  const size_t width_, groups_, panels_;
};

// What the next product reads, or what follows the block's operand in memory:
// the next block's. It comes from L3, which holds all of Q, dO and dQ when L2
// holds a block of them; without being asked for it costs a tenth of the time.
struct Ahead {
  const void* data = nullptr;
  size_t bytes = 0;
  // Product::next_step of `blocks` register blocks of `steps` steps.
  size_t Step(size_t blocks, size_t steps) const {
    const size_t turns = blocks * (steps / kTurn);
    return data == nullptr || turns == 0 ? 0 : (bytes + turns - 1) / turns;
  }
};

// Rows of a product in register blocks. C += A B where A is by rows (kUnitStep)
// or by columns.
template <class Op, bool kUnitStep, class D>
HWY_INLINE void RowBlocks(D d, size_t rows, size_t vectors,
                          Product<typename Op::Element, typename Op::Sum> p) {
  const size_t a_row = kUnitStep ? p.a_row : 1;
  for (size_t row = 0; row < rows; row += kBlockRows) {
    AnyRegisterBlock<Op, kUnitStep>(d, std::min(kBlockRows, rows - row),
                                    vectors, p);
    p.a += kBlockRows * a_row;
    p.c += kBlockRows * p.c_row;
    p.next += NextBytes(p);
  }
}

template <class Op>
struct LaneEngine {
  using T = typename Op::Sum;
  using Element = typename Op::Element;
  using D = EngineTag<T>;
  using Prod = Product<Element, T>;
  static constexpr size_t kPerLane = Op::kPerLane;

  static const T* Ptr(const void* p) { return static_cast<const T*>(p); }
  static T* Ptr(void* p) { return static_cast<T*>(p); }
  static const Element* Packed(const void* p) {
    return static_cast<const Element*>(p);
  }

  // Deep heads are summed in parts: 128 steps of a panel of 64 f32 or pairs are
  // 32 KiB, which L1 holds while all key rows pass.
  static constexpr size_t kDepthPart = 128 * sizeof(float) / sizeof(T);

  // The same for S. A scale of more than twice the usual 1 / sqrt(D) makes
  // large scores, whose rounding the exponential magnifies: shorter sums, by a
  // third less wrong, then pay for reading and writing S twice as often.
  static size_t ScoreDepthPart(const Block& block) {
    const double scores = std::abs(block.score.scale) *
                          std::sqrt(static_cast<double>(block.head_dim));
    return scores > 2.0 ? 32 : kDepthPart;
  }

  // One panel of S^T = L R (rows `keys` of the block, all columns of the
  // panel).
  static HWY_INLINE void ScorePanel(D d, const Element* left,
                                    const Element* right, size_t depth,
                                    size_t depth_part, const Range& keys,
                                    const Ahead& ahead, T* HWY_RESTRICT out) {
    const size_t width = PanelWidth(d);
    const size_t steps = Steps<Op>(depth);
    const size_t stride = ScoreStride<Op>(d, depth);
    const size_t blocks = (keys.end - keys.begin + kBlockRows - 1) / kBlockRows;
    const size_t next_step = ahead.Step(blocks, steps);
    const char* next = static_cast<const char*>(ahead.data);
    for (size_t part = 0; part == 0 || part < steps; part += depth_part) {
      const Prod p{left + keys.begin * stride + part,
                   stride,
                   1,
                   0,
                   right + part * width,
                   out + keys.begin * width,
                   width,
                   std::min(depth_part, steps - part),
                   1,
                   part > 0,
                   nullptr,
                   next,
                   next_step};
      RowBlocks<Op, true>(d, keys.end - keys.begin, kBlockVectors, p);
      next += blocks * NextBytes(p);
    }
  }

  // dV += P^T dO or dK += dS^T Q for all keys of the block. `left` is
  // [panel][key][Steps(W)], `right` kGradRight, `sum` [key][RowStride(depth)].
  static HWY_INLINE void KeyGradient(D d, const Block& block,
                                     const PanelMap& map, const Element* left,
                                     const Element* right, size_t depth,
                                     bool add, const Ahead& after,
                                     T* HWY_RESTRICT sum) {
    const size_t width = PanelWidth(d);
    const size_t steps = width / kPerLane;
    const size_t lanes = hn::Lanes(d);
    const size_t keys = static_cast<size_t>(block.keys);
    const size_t queries = static_cast<size_t>(block.queries);
    const size_t stride = RowStride(d, depth);
    // A panel of `right` (queries x 64 f32 = 32 KiB at 128 queries) stays in
    // L1 while all key rows pass.
    for (size_t c0 = 0; c0 < stride; c0 += width) {
      const size_t panel_width = std::min(width, stride - c0);
      const Element* panel = right + c0 * (queries / kPerLane);
      Ahead ahead = after;
      if (c0 + width < stride) {
        ahead.data = panel + panel_width * (queries / kPerLane);
        ahead.bytes = std::min(width, stride - c0 - width) *
                      (queries / kPerLane) * sizeof(Element);
      }
      const size_t next_step =
          ahead.Step((keys + kBlockRows - 1) / kBlockRows, queries / kPerLane);
      const char* next = static_cast<const char*>(ahead.data);
      for (size_t row = 0; row < keys; row += kBlockRows) {
        const size_t rows = std::min(kBlockRows, keys - row);
        const Range panels = map.Panels(row, row + rows);
        T* c = sum + row * stride + c0;
        if (panels.empty()) {
          if (!add) {
            for (size_t r = 0; r < rows; ++r) {
              std::fill_n(c + r * stride, panel_width, T(0));
            }
          }
          continue;
        }
        const Prod p{left + (panels.begin * keys + row) * steps,
                     steps,
                     1,
                     keys * steps,
                     panel + panels.begin * steps * panel_width,
                     c,
                     stride,
                     steps,
                     panels.end - panels.begin,
                     add,
                     nullptr,
                     next,
                     next_step};
        next += NextBytes(p);
        AnyRegisterBlock<Op, true>(d, rows, panel_width / lanes, p);
      }
    }
  }

  // One panel of dQ^T += K^T dS^T or O^T = factor O^T + V^T P^T: `left`
  // kGradLeft, `right` [Steps(key)][W], `sum` [depth][W], `factor` [W].
  static HWY_INLINE void QueryPanel(D d, const Element* left,
                                    const Element* right, size_t depth,
                                    const Range& keys, bool add,
                                    const T* factor, const Ahead& ahead,
                                    T* HWY_RESTRICT sum) {
    const size_t width = PanelWidth(d);
    const size_t stride = RowStride(d, depth);
    if (keys.empty()) {
      if (!add) std::fill_n(sum, depth * width, T(0));
      return;
    }
    // Ranges begin and end with whole steps: they are multiples of 16 keys, or
    // of the block's, which key_panel divides.
    const size_t first = keys.begin / kPerLane;
    const Prod p{left + first * stride,
                 1,
                 stride,
                 0,
                 right + first * width,
                 sum,
                 width,
                 (keys.end - keys.begin) / kPerLane,
                 1,
                 add,
                 factor,
                 static_cast<const char*>(ahead.data),
                 ahead.Step((depth + kBlockRows - 1) / kBlockRows,
                            (keys.end - keys.begin) / kPerLane)};
    RowBlocks<Op, false>(d, depth, kBlockVectors, p);
  }

  // The fused pass over one panel; hidden groups become zeros.
  static void BackwardPassOfPanel(D d, const BackwardBlock& block,
                                  const PanelMap& map, size_t panel,
                                  const BackwardScores<Op>& scores) {
    const size_t width = PanelWidth(d);
    T* s = scores.s(panel);
    T* dp = scores.dp(panel);
    const size_t column = panel * width;
    PassArea area{0, 0, column, width};
    const PanelOptions<T> options(block.score, area);
    const T* lse = Ptr(block.lse) + column;
    const T* delta = Ptr(block.delta) + column;
    T* ds = block.ds == nullptr
                ? nullptr
                : Ptr(block.ds) +
                      column * static_cast<size_t>(block.score.staged_key_rows);
    const bool general = !block.score.plain() || ds != nullptr ||
                         block.alibi_gradient != nullptr;
    for (size_t begin = 0; begin < static_cast<size_t>(block.keys);
         begin += kTileKeys) {
      area.key_begin = begin;
      area.key_end = std::min<size_t>(begin + kTileKeys, block.keys);
      const size_t at = begin * width;
      const size_t count = (area.key_end - begin) * width;
      const TileState state = map.State(begin / kTileKeys, panel);
      if (state == TileState::kHidden) {
        // dV and dK read whole register blocks of rows, also outside the hull.
        std::fill_n(s + at, count, T(0));
        std::fill_n(dp + at, count, T(0));
        if (ds != nullptr) std::fill_n(ds + at, count, T(0));
      } else if (state == TileState::kPartial) {
        if (general) {
          BackwardPass<true, true>(d, options, area, lse, delta, s, dp, ds,
                                   block.alibi_gradient);
        } else {
          BackwardPass<true, false>(d, options, area, lse, delta, s, dp, ds,
                                    nullptr);
        }
      } else if (general) {
        BackwardPass<false, true>(d, options, area, lse, delta, s, dp, ds,
                                  block.alibi_gradient);
      } else {
        BackwardPass<false, false>(d, options, area, lse, delta, s, dp, ds,
                                   nullptr);
      }
      scores.Finish(d, panel, area.key_begin, area.key_end);
    }
  }

  static void Backward(const BackwardBlock& block) {
    const D d;
    const size_t width = PanelWidth(d);
    const size_t keys = static_cast<size_t>(block.keys);
    const size_t head_dim = static_cast<size_t>(block.head_dim);
    const size_t value_dim = static_cast<size_t>(block.value_dim);
    const PanelMap map(block, width);
    const BackwardScores<Op> scores(block.scratch, width, keys,
                                    static_cast<size_t>(block.queries));
    for (size_t panel = 0; panel < map.panels(); ++panel) {
      const Range range = map.Keys(panel);
      const size_t column = panel * width;
      if (!range.empty()) {
        const Element* dout =
            Packed(block.dout_score) + column * Steps<Op>(value_dim);
        ScorePanel(d, Packed(block.k_score),
                   Packed(block.q_score) + column * Steps<Op>(head_dim),
                   head_dim, ScoreDepthPart(block), range,
                   {dout, Steps<Op>(value_dim) * width * sizeof(Element)},
                   scores.s(panel));
        ScorePanel(
            d, Packed(block.v_score), dout, value_dim, kDepthPart, range,
            {block.dq == nullptr ? nullptr : Ptr(block.dq) + column * head_dim,
             head_dim * width * sizeof(T)},
            scores.dp(panel));
      }
      BackwardPassOfPanel(d, block, map, panel, scores);
      if (block.dq != nullptr) {
        const Ahead ahead =
            panel + 1 < map.panels()
                ? Ahead{Packed(block.q_score) +
                            (column + width) * Steps<Op>(head_dim),
                        Steps<Op>(head_dim) * width * sizeof(Element)}
                : Ahead{block.dout_grad, std::min(width, value_dim) *
                                             Steps<Op>(map.panels() * width) *
                                             sizeof(Element)};
        QueryPanel(d, Packed(block.k_grad), scores.ds_right(panel), head_dim,
                   range, block.add_to_dq, nullptr, ahead,
                   Ptr(block.dq) + column * head_dim);
      }
    }
    if (block.dv != nullptr) {
      for (size_t term = 0; term < Op::kTerms; ++term) {
        KeyGradient(d, block, map, scores.p(term), Packed(block.dout_grad),
                    value_dim, block.add_to_dv || term > 0,
                    {block.q_grad, std::min(width, head_dim) *
                                       Steps<Op>(map.panels() * width) *
                                       sizeof(Element)},
                    Ptr(block.dv));
      }
    }
    if (block.dk != nullptr) {
      KeyGradient(
          d, block, map, scores.ds(), Packed(block.q_grad), head_dim,
          block.add_to_dk,
          {Packed(block.q_score) + map.panels() * width * Steps<Op>(head_dim),
           width * Steps<Op>(head_dim) * sizeof(Element)},
          Ptr(block.dk));
    }
  }

  static void Forward(const ForwardBlock& block) {
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
      PassArea area{keys.begin, keys.end, column, width};
      const PanelOptions<T> options(block.score, area);
      T* row_max = Ptr(block.row_max) + column;
      T* row_sum = Ptr(block.row_sum) + column;
      T* row_weight = block.row_weight == nullptr
                          ? nullptr
                          : Ptr(block.row_weight) + column;
      ScorePanel(d, Packed(block.k_score),
                 Packed(block.q_score) + column * Steps<Op>(head_dim), head_dim,
                 ScoreDepthPart(block), keys,
                 {block.v_grad, Steps<Op>(static_cast<size_t>(block.keys)) *
                                    RowStride(d, value_dim) * sizeof(Element)},
                 s);
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
      if (general) {
        ForwardExpPass<true, true>(d, options, area, s, row_max, row_sum);
      } else if (block.tiles != nullptr) {
        ForwardExpPass<false, true>(d, options, area, s, row_max, row_sum);
      } else {
        ForwardExpPass<false, false>(d, options, area, s, row_max, row_sum);
      }
      // With dropout the rounding errors of numerator and denominator have
      // nothing in common.
      const bool same_weight = block.score.dropout != nullptr;
      scores.Finish(d, keys.begin, keys.end,
                    same_weight ? nullptr : row_weight);
      if (same_weight && row_weight != nullptr) {
        std::copy_n(row_sum, width, row_weight);
      }
      for (size_t term = 0; term < Op::kTerms; ++term) {
        QueryPanel(d, Packed(block.v_grad), scores.p(term), value_dim, keys,
                   !block.first || term > 0, term > 0 ? nullptr : factor,
                   {Packed(block.k_score) + static_cast<size_t>(block.keys) *
                                                ScoreStride<Op>(d, head_dim),
                    static_cast<size_t>(block.keys) *
                        ScoreStride<Op>(d, head_dim) * sizeof(Element)},
                   out);
      }
    }
  }

  // A panel of the right operand holds `rows` x W elements and should fill at
  // most two thirds of a 48 KiB L1, with the rest left to A and C: 128 rows of
  // 64 f32 are 32 KiB. Deep heads take smaller blocks, so that K, V, their
  // gradients and the Q and dO of a block (10 arrays of rows x depth) stay
  // within a 2 MiB L2.
  static BlockSizes Blocks(int64_t head_dim, int64_t value_dim) {
    const D d;
    const int64_t width = static_cast<int64_t>(PanelWidth(d));
    const int64_t depth = std::max<int64_t>(head_dim, value_dim);
    int64_t rows = 128;
    while (rows > width && rows > 2 * kTileKeys &&
           rows * depth * static_cast<int64_t>(sizeof(T)) * 10 > (2 << 20)) {
      rows /= 2;
    }
    // Products with pairs are so fast that the last rows of a block would tell:
    // 96 keys are 16 register blocks of 6.
    const int64_t keys = kPerLane == 1 ? rows : rows / 4 * 3;
    return {keys, static_cast<int64_t>(RoundUp(rows, width))};
  }

  static size_t PackedBytes(Role role, int64_t rows, int64_t depth) {
    return PackedBytesOf<Op>(D(), role, static_cast<size_t>(rows),
                             static_cast<size_t>(depth));
  }

  static bool Pack(Role role, const Rows& rows, int64_t padded_rows,
                   bool finite_only, void* packed) {
    bool finite = true;
    Op::WithInput(rows.dtype, [&](auto tag) {
      finite =
          PackRows<Op>(D(), tag, role, rows, static_cast<size_t>(padded_rows),
                       finite_only, static_cast<Element*>(packed));
    });
    return finite;
  }

  static size_t KeyAccumulatorBytes(int64_t keys, int64_t depth) {
    return static_cast<size_t>(keys) *
           RowStride(D(), static_cast<size_t>(depth)) * sizeof(T);
  }

  static size_t QueryAccumulatorBytes(int64_t queries, int64_t depth) {
    const size_t rows = RoundUp(static_cast<size_t>(queries), PanelWidth(D()));
    return rows * static_cast<size_t>(depth) * sizeof(T);
  }

  static void UnpackKeyRows(const void* accumulator, int64_t /*keys*/,
                            int64_t depth, int64_t first, int64_t count,
                            void* rows, int64_t row_stride) {
    const size_t stride = RowStride(D(), static_cast<size_t>(depth));
    for (int64_t r = 0; r < count; ++r) {
      std::copy_n(Ptr(accumulator) + static_cast<size_t>(first + r) * stride,
                  depth, Ptr(rows) + r * row_stride);
    }
  }

  static void UnpackQueryRows(const void* accumulator, int64_t /*queries*/,
                              int64_t depth, int64_t first, int64_t count,
                              void* rows, int64_t row_stride) {
    const int64_t width = static_cast<int64_t>(PanelWidth(D()));
    for (int64_t r = 0; r < count;) {
      const int64_t column = (first + r) % width;
      const int64_t columns = std::min(count - r, width - column);
      Transpose(Ptr(accumulator) + (first + r - column) * depth + column, width,
                depth, columns, Ptr(rows) + r * row_stride, row_stride);
      r += columns;
    }
  }

  static size_t ScratchBytes(const BlockSizes& blocks, int64_t /*head_dim*/,
                             int64_t /*value_dim*/) {
    const size_t width = PanelWidth(D());
    const size_t keys = static_cast<size_t>(blocks.keys);
    const size_t queries = RoundUp(static_cast<size_t>(blocks.queries), width);
    return RoundUp(
        std::max(BackwardScores<Op>::Bytes(width, keys, queries),
                 2 * width * sizeof(T) + ForwardScores<Op>::Bytes(width, keys)),
        64);
  }

  static const Engine* Get(const char* name, DType accumulator) {
    static const Engine engine = [name, accumulator] {
      Engine e;
      e.name = name;
      e.accumulator = accumulator;
      e.query_panel = static_cast<int64_t>(PanelWidth(D()));
      e.key_panel = kTileKeys;
      e.grad_left_is_score_left = kPerLane == 1;
      e.rounds_probabilities = Op::kPerLane * Op::kTerms == 2;
      e.backward_blocks = Blocks;
      e.forward_blocks = Blocks;
      e.packed_bytes = PackedBytes;
      e.pack = Pack;
      e.key_accumulator_bytes = KeyAccumulatorBytes;
      e.query_accumulator_bytes = QueryAccumulatorBytes;
      e.unpack_key_rows = UnpackKeyRows;
      e.unpack_query_rows = UnpackQueryRows;
      e.scratch_bytes = ScratchBytes;
      e.backward = Backward;
      e.forward = Forward;
      return e;
    }();
    return &engine;
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
