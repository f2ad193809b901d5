// SPDX-License-Identifier: Apache-2.0

// Packing of operands into lanes. A lane holds one element, or kPerLane = n
// neighbours along the dimension that the role is summed over. Layouts, with W
// = PanelWidth(d) and every dimension padded with zeros:
//   kScoreLeft   [row][ScoreStride(depth)]
//   kScoreRight  [row / W][depth / n][W]; the last panel is only as wide as
//                its rows, padded to QueryGrain(d)
//   kGradLeft    [row / n][RowStride(depth)]
//   kGradRight   [depth / W][row / n][W]; the last panel is only as many whole
//                vectors wide as it needs

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_PACK_INL_H_
#undef FA2_SRC_SIMD_LANE_PACK_INL_H_
#else
#define FA2_SRC_SIMD_LANE_PACK_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/engine.h"
#include "src/simd/lane/register_block-inl.h"
#include "src/simd/math/load-inl.h"
#include "src/simd/math/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Vectors longer than this (RISC-V has them) are used in part: buffers on the
// stack stay small.
inline constexpr size_t kMaxVectorBytes =
    HWY_MAX_BYTES < 256 ? HWY_MAX_BYTES : 256;
template <typename T>
using EngineTag = hn::CappedTag<T, kMaxVectorBytes / sizeof(T)>;

// Columns of a panel: what a register block takes at once.
template <class D>
HWY_INLINE size_t PanelWidth(D d) {
  return kBlockVectors * hn::Lanes(d);
}

HWY_INLINE size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// What the last panel's width is a multiple of: whole vectors, two where lanes
// hold pairs, since two vectors of sums make one of bf16; and 16, the queries
// that rowwise/staging.cc takes at a time and a cache line of f32.
template <class Op, class D>
HWY_INLINE size_t QueryGrain(D d) {
  constexpr size_t kPerLane = std::max(Op::kPerLane, Op::Scores::kPerLane);
  return std::min(PanelWidth(d), std::max<size_t>(kPerLane * hn::Lanes(d), 16));
}

// Lanes that `count` elements along a summed dimension take.
template <class Op>
HWY_INLINE constexpr size_t Steps(size_t count) {
  return (count + Op::kPerLane - 1) / Op::kPerLane;
}

// Whole vectors, so that a row can be written without a tail.
template <class D>
HWY_INLINE size_t RowStride(D d, size_t depth) {
  return RoundUp(depth, hn::Lanes(d));
}
template <class Op, class D>
HWY_INLINE size_t ScoreStride(D d, size_t depth) {
  return RowStride(d, Steps<Op>(depth));
}

// Writes one row to `out` (RowStride(depth) elements, zeros past depth).
// Returns whether all elements are finite.
template <class D, class Stored>
HWY_INLINE bool WidenRow(D d, Stored tag, const typename Stored::Type* row,
                         size_t depth, bool finite_only,
                         hn::TFromD<D>* HWY_RESTRICT out) {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  const size_t lanes = hn::Lanes(d);
  const V zero = hn::Zero(d);
  // x * 0 is 0 for every finite x and NaN for the rest, so one sum tells.
  V bad = zero;
  for (size_t i = 0; i < depth; i += lanes) {
    V x = i + lanes <= depth ? LoadWide(d, tag, row + i)
                             : LoadWideTail(d, tag, row + i, depth - i);
    const V zeroed = hn::Mul(x, zero);
    bad = hn::Add(bad, zeroed);
    if (finite_only) x = hn::IfThenElseZero(hn::Eq(zeroed, zero), x);
    hn::StoreU(x, d, out + i);
  }
  return hn::AllTrue(d, hn::Eq(bad, hn::Set(d, T(0))));
}

// Rows of an operand into lanes; this one is for one element a lane. AlongRow
// and AcrossRows write whole vectors; all return whether all elements are
// finite. Finite takes whole vectors only.
template <class Op>
struct LanePacker {
  template <class D, class Stored>
  static HWY_INLINE bool AlongRow(D d, Stored tag,
                                  const typename Stored::Type* row,
                                  size_t depth, bool finite_only,
                                  typename Op::Element* HWY_RESTRICT out) {
    return WidenRow(d, tag, row, depth, finite_only, out);
  }
  // Whether a row is finite, without writing it.
  template <class D, class Stored>
  static HWY_INLINE bool Finite(D d, Stored tag,
                                const typename Stored::Type* row,
                                size_t depth) {
    auto bad = hn::Zero(d);
    for (size_t i = 0; i < depth; i += hn::Lanes(d)) {
      bad = hn::MulAdd(LoadWide(d, tag, row + i), hn::Zero(d), bad);
    }
    return hn::AllTrue(d, hn::Eq(bad, hn::Zero(d)));
  }
  // The elements of a column in kPerLane rows, of which the first `rows` exist,
  // share a lane.
  template <class D, class Stored>
  static HWY_INLINE bool AcrossRows(D d, Stored tag,
                                    const typename Stored::Type* first,
                                    int64_t /*row_stride*/, size_t /*rows*/,
                                    size_t columns, bool finite_only,
                                    typename Op::Element* HWY_RESTRICT out) {
    return WidenRow(d, tag, first, columns, finite_only, out);
  }
};

template <class Op, class D>
HWY_INLINE size_t PackedBytesOf(D d, Role role, size_t rows, size_t depth) {
  size_t elements = 0;
  if (role == Role::kScoreRight) {
    elements = RoundUp(rows, QueryGrain<Op>(d)) * Steps<Op>(depth);
  } else if (role == Role::kScoreLeft) {
    elements = rows * ScoreStride<Op>(d, depth);
  } else {
    elements = Steps<Op>(rows) * RowStride(d, depth);
  }
  return elements * sizeof(typename Op::Element);
}

// Whether rows are finite.
template <class D, class Stored>
HWY_INLINE bool AllFinite(D d, Stored tag, const Rows& rows) {
  const size_t lanes = hn::Lanes(d);
  const size_t depth = static_cast<size_t>(rows.depth);
  auto bad = hn::Zero(d);
  for (int64_t r = 0; r < rows.rows; ++r) {
    const auto* row =
        static_cast<const typename Stored::Type*>(rows.data) + r * rows.stride;
    for (size_t i = 0; i < depth; i += lanes) {
      const auto x = i + lanes <= depth
                         ? LoadWide(d, tag, row + i)
                         : LoadWideTail(d, tag, row + i, depth - i);
      bad = hn::MulAdd(x, hn::Zero(d), bad);
    }
  }
  return hn::AllTrue(d, hn::Eq(bad, hn::Zero(d)));
}

template <class Op, class D, class Stored>
HWY_INLINE bool PackRows(D d, Stored tag, Role role, const Rows& source,
                         size_t padded_rows, bool finite_only,
                         typename Op::Element* HWY_RESTRICT packed) {
  using Element = typename Op::Element;
  using Packer = LanePacker<Op>;
  constexpr size_t kPerLane = Op::kPerLane;
  const size_t lanes = hn::Lanes(d);
  const size_t depth = static_cast<size_t>(source.depth);
  const size_t rows = static_cast<size_t>(source.rows);
  const auto* data = static_cast<const typename Stored::Type*>(source.data);
  const auto row_data = [&](size_t r) {
    return data + static_cast<int64_t>(r) * source.stride;
  };
  bool finite = true;
  if constexpr (kPerLane == 1) {
    if (packed == nullptr) return AllFinite(d, tag, source);
  }
  if (role == Role::kScoreLeft) {
    const size_t stride = ScoreStride<Op>(d, depth);
    for (size_t r = 0; r < padded_rows; ++r) {
      Element* out = packed + r * stride;
      if (r < rows) {
        finite &=
            Packer::AlongRow(d, tag, row_data(r), depth, finite_only, out);
      } else {
        std::fill_n(out, stride, Element(0));
      }
    }
    return finite;
  }
  // Columns [c0, c0 + columns) of all rows, summed over rows.
  const auto pack_across = [&](size_t c0, size_t columns, Element* out) {
    const size_t stride = RowStride(d, columns);
    for (size_t r = 0; r < padded_rows; r += kPerLane, out += stride) {
      if (r < rows) {
        finite &= Packer::AcrossRows(d, tag, row_data(r) + c0, source.stride,
                                     std::min(kPerLane, rows - r), columns,
                                     finite_only, out);
      } else {
        std::fill_n(out, stride, Element(0));
      }
    }
  };
  if (role == Role::kGradLeft) {
    pack_across(0, depth, packed);
    return finite;
  }
  const size_t panel = PanelWidth(d);
  if (role == Role::kGradRight) {
    for (size_t c0 = 0; c0 < depth; c0 += panel) {
      pack_across(c0, std::min(panel, depth - c0),
                  packed + c0 * Steps<Op>(padded_rows));
    }
    return finite;
  }
  // Rows that are lanes as they stand, in whole squares, are transposed where
  // they are. Others go by way of strips: 64 lanes of 64 rows are 16 KiB of
  // f32, half of L1.
  const size_t steps = Steps<Op>(depth);
  const bool as_they_stand =
      sizeof(typename Stored::Type) * kPerLane == sizeof(Element) &&
      !finite_only && steps % RoundUp(lanes, kSquare) == 0 &&
      depth % kPerLane == 0 &&
      source.stride % static_cast<int64_t>(kPerLane) == 0;
  constexpr size_t kStrip = 64;
  constexpr size_t kMaxWidth =
      kBlockVectors * kMaxVectorBytes / sizeof(typename Op::Sum);
  HWY_ALIGN Element strip[kStrip * kMaxWidth];
  const size_t strip_columns = RoundUp(std::min(kStrip, steps), lanes);
  for (size_t r0 = 0; r0 < padded_rows; r0 += panel) {
    const size_t width = std::min(panel, padded_rows - r0);
    if (as_they_stand && r0 + width <= rows) {
      // First, since rows in order come faster from afar than squares.
      for (size_t r = 0; r < width; ++r) {
        finite &= Packer::Finite(d, tag, row_data(r0 + r), depth);
      }
      Transpose(reinterpret_cast<const Element*>(row_data(r0)),
                source.stride / static_cast<int64_t>(kPerLane),
                static_cast<int64_t>(width), static_cast<int64_t>(steps),
                packed + r0 * steps, static_cast<int64_t>(width));
      continue;
    }
    for (size_t c0 = 0; c0 < steps; c0 += kStrip) {
      const size_t columns = std::min(kStrip, steps - c0);
      for (size_t r = 0; r < width; ++r) {
        Element* out = strip + r * strip_columns;
        if (r0 + r < rows) {
          finite &= Packer::AlongRow(
              d, tag, row_data(r0 + r) + c0 * kPerLane,
              std::min(columns * kPerLane, depth - c0 * kPerLane), finite_only,
              out);
        } else {
          std::fill_n(out, strip_columns, Element(0));
        }
      }
      Transpose(strip, static_cast<int64_t>(strip_columns),
                static_cast<int64_t>(width), static_cast<int64_t>(columns),
                packed + r0 * steps + c0 * width, static_cast<int64_t>(width));
    }
  }
  return finite;
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
