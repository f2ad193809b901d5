// SPDX-License-Identifier: Apache-2.0

// The products of the engines made of vector lanes: S^T and dP^T, dV and dK,
// dQ^T and O^T, each for one panel of queries or all keys of a block, by
// register blocks.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_PRODUCTS_INL_H_
#undef FA2_SRC_SIMD_LANE_PRODUCTS_INL_H_
#else
#define FA2_SRC_SIMD_LANE_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/engine.h"
#include "src/simd/lane/pack-inl.h"
#include "src/simd/lane/panel_map-inl.h"
#include "src/simd/lane/register_block-inl.h"
#include "src/simd/lane/staggered_blocks-inl.h"
#include "src/simd/math/prefetch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// What the next product reads, or what follows the block's operand in memory:
// the next block's. It comes from L3, which holds all of Q, dO and dQ when L2
// holds a block of them; without a prefetch that costs a tenth of the time.
struct Ahead {
  const void* data = nullptr;
  size_t bytes = 0;
  // Product::next_step of `blocks` register blocks of `steps` steps.
  size_t Step(size_t blocks, size_t steps) const {
    const size_t turns = blocks * (steps / kTurn);
    return data == nullptr || turns == 0 ? 0 : (bytes + turns - 1) / turns;
  }
};

// To memory; before each register block some lines of rows that are elsewhere
// are prefetched.
class ToMemoryAhead : public ToMemory {
 public:
  // Over `blocks` register blocks, at least one.
  ToMemoryAhead(const PrefetchList& list, size_t blocks)
      : ahead_(list, static_cast<int64_t>(blocks)) {}

  void Begin() { ahead_.Step(); }

 private:
  LinesAhead ahead_;
};

// Between rows of an operand that is taken as it lies or, where that is 0, has
// been packed.
constexpr size_t StrideOr(int64_t as_it_lies, size_t packed) {
  return as_it_lies > 0 ? static_cast<size_t>(as_it_lies) : packed;
}

// Register blocks of so many rows.
constexpr size_t RowBlocksOf(size_t rows) {
  return (rows + kBlockRows - 1) / kBlockRows;
}

// Rows of the next register block of `left` rows and so many vectors. Two rows
// of two vectors are too few sums to hide the latency of a multiply-add: the
// last eight are 4 + 4.
constexpr size_t RowsOfBlock(size_t left, size_t vectors) {
  const bool halves = vectors == 2 && left == kBlockRows + 2;
  return halves ? left / 2 : std::min(kBlockRows, left);
}

// Rows of a product in register blocks. C += A B where A is by rows (kUnitStep)
// or by columns.
template <class Op, bool kUnitStep, class D, class Sink>
HWY_INLINE void RowBlocks(D d, size_t rows, size_t vectors,
                          Product<typename Op::Element, typename Op::Sum> p,
                          Sink& sink) {
  const size_t a_row = kUnitStep ? p.a_row : 1;
  size_t taken;
  for (size_t row = 0; row < rows; row += taken) {
    sink.Begin();
    taken = RowsOfBlock(rows - row, vectors);
    AnyRegisterBlock<Op, kUnitStep>(d, taken, vectors, p);
    p.a += taken * a_row;
    p.c += taken * p.c_row;
    p.next += NextBytes(p);
  }
}

// Rows of A B, an even number, and all columns of a panel, into a sink.
template <class Op, class D, class Sink>
HWY_INLINE void RowBlocksInto(D d, size_t rows,
                              Product<typename Op::Element, typename Op::Sum> p,
                              Sink sink) {
  constexpr size_t kVectors = kBlockVectors;
  if constexpr (Sink::kStaggers) {
    const size_t blocks = rows / kBlockRows;
    if (blocks > 0 && p.steps >= kLeastStaggeredSteps) {
      StaggeredBlocks<Op>(d, blocks, p, sink);
      rows -= blocks * kBlockRows;
      p.a += blocks * kBlockRows * p.a_row;
      p.next += blocks * NextBytes(p);
      sink.Advance(blocks * kBlockRows);
    }
  }
  for (; rows >= kBlockRows; rows -= kBlockRows) {
    RegisterBlock<Op, true, kBlockRows, kVectors>(d, p, sink);
    p.a += kBlockRows * p.a_row;
    p.next += NextBytes(p);
    sink.Advance(kBlockRows);
  }
  if (rows == 4) {
    RegisterBlock<Op, true, 4, kVectors>(d, p, sink);
  } else if (rows == 2) {
    RegisterBlock<Op, true, 2, kVectors>(d, p, sink);
  }
}

template <class Op>
struct LaneProducts {
  using T = typename Op::Sum;
  using Element = typename Op::Element;
  using Scores = typename Op::Scores;
  using ScoreElement = typename Scores::Element;
  using D = EngineTag<T>;
  using Prod = Product<Element, T>;
  static constexpr size_t kPerLane = Op::kPerLane;

  static const T* Ptr(const void* p) { return static_cast<const T*>(p); }
  static T* Ptr(void* p) { return static_cast<T*>(p); }
  static const Element* Packed(const void* p) {
    return static_cast<const Element*>(p);
  }
  static const ScoreElement* PackedScores(const void* p) {
    return static_cast<const ScoreElement*>(p);
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

  // One panel of S^T = L R (rows `keys` of the block, `stride` elements apart,
  // the panel's `width` columns), `out` its first row, W elements long. A sink
  // that is not memory takes sums over the whole depth, of all W columns: its
  // steps must not exceed depth_part.
  template <class Sink>
  static HWY_INLINE void ScorePanel(D d, const ScoreElement* left,
                                    size_t stride, const ScoreElement* right,
                                    size_t depth, size_t depth_part,
                                    size_t width, const Range& keys,
                                    const Ahead& ahead, T* HWY_RESTRICT out,
                                    Sink& sink) {
    const size_t steps = Steps<Scores>(depth);
    const size_t blocks = RowBlocksOf(keys.end - keys.begin);
    const size_t next_step = ahead.Step(blocks, steps);
    const char* next = static_cast<const char*>(ahead.data);
    for (size_t part = 0; part == 0 || part < steps; part += depth_part) {
      const Product<ScoreElement, T> p{left + keys.begin * stride + part,
                                       stride,
                                       1,
                                       0,
                                       right + part * width,
                                       out,
                                       PanelWidth(d),
                                       std::min(depth_part, steps - part),
                                       1,
                                       part > 0,
                                       nullptr,
                                       next,
                                       next_step};
      if constexpr (Sink::kIsMemory) {
        RowBlocks<Scores, true>(d, keys.end - keys.begin, width / hn::Lanes(d),
                                p, sink);
      } else {
        RowBlocksInto<Scores>(d, keys.end - keys.begin, p, sink);
      }
      next += blocks * NextBytes(p);
    }
  }

  // dV += P^T dO or dK += dS^T Q for the keys of the block that count. `left`
  // is [panel][key][Steps(W)], `right` kGradRight, `sum`
  // [key][RowStride(depth)].
  static HWY_INLINE void KeyGradient(D d, const Block& block,
                                     const PanelMap& map, const Element* left,
                                     const Element* right, size_t depth,
                                     bool add, const Ahead& after,
                                     T* HWY_RESTRICT sum) {
    const size_t width = PanelWidth(d);
    const size_t steps = width / kPerLane;
    const size_t lanes = hn::Lanes(d);
    const size_t left_panel = static_cast<size_t>(block.keys) * steps;
    const size_t keys = map.keys();
    const size_t queries = static_cast<size_t>(block.queries);
    const size_t stride = RowStride(d, depth);
    // The last panel is summed by itself where a quarter of it and more is
    // padding, or it is the only one.
    const size_t used = static_cast<size_t>(block.UsedQueries());
    const size_t last_steps =
        Steps<Op>(used - std::min(used, (map.panels() - 1) * width));
    const size_t whole = map.panels() > 1 && last_steps > steps / 4 * 3 &&
                                 map.Width(map.panels() - 1) == width
                             ? map.panels()
                             : map.panels() - 1;
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
          ahead.Step(RowBlocksOf(keys), queries / kPerLane);
      const char* next = static_cast<const char*>(ahead.data);
      size_t rows;
      for (size_t row = 0; row < keys; row += rows) {
        rows = RowsOfBlock(keys - row, panel_width / lanes);
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
        Prod p{left + panels.begin * left_panel + row * steps,
               steps,
               1,
               left_panel,
               panel + panels.begin * steps * panel_width,
               c,
               stride,
               steps,
               std::min(panels.end, whole) - std::min(panels.begin, whole),
               add,
               nullptr,
               next,
               next_step};
        if (p.segments > 0) {
          AnyRegisterBlock<Op, true>(d, rows, panel_width / lanes, p);
          p.add = true;
        }
        if (panels.end > whole) {
          p.a = left + whole * left_panel + row * steps;
          p.b = panel + whole * steps * panel_width;
          p.next += NextBytes(p);
          p.steps = last_steps;
          p.segments = 1;
          AnyRegisterBlock<Op, true>(d, rows, panel_width / lanes, p);
        }
        next = p.next + NextBytes(p);
      }
    }
  }

  // One panel of dQ^T += K^T dS^T or O^T = factor O^T + V^T P^T, of `width`
  // columns: `left` kGradLeft, its rows `stride` elements apart, `right`
  // [Steps(key)][W], `sum` [depth][width], `factor` [width].
  static HWY_INLINE void QueryPanel(D d, const Element* left, size_t stride,
                                    const Element* right, size_t depth,
                                    size_t width, const Range& keys, bool add,
                                    const T* factor, const Ahead& ahead,
                                    T* HWY_RESTRICT sum) {
    if (keys.empty()) {
      if (!add) std::fill_n(sum, depth * width, T(0));
      return;
    }
    // Ranges begin and end with whole steps: they are multiples of 16 keys, or
    // of the block's, which key_panel divides.
    const size_t first = keys.begin / kPerLane;
    const Prod p{
        left + first * stride,
        1,
        stride,
        0,
        right + first * PanelWidth(d),
        sum,
        width,
        (keys.end - keys.begin) / kPerLane,
        1,
        add,
        factor,
        static_cast<const char*>(ahead.data),
        ahead.Step(RowBlocksOf(depth), (keys.end - keys.begin) / kPerLane)};
    ToMemory sink;
    RowBlocks<Op, false>(d, depth, width / hn::Lanes(d), p, sink);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
