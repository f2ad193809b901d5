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

// Writes rows to `out`, RowStride(depth) elements each, zeros past depth.
// Returns whether all elements are finite; with kFinite the others become 0.
template <bool kFinite, class D, class Stored>
HWY_INLINE bool WidenRows(D d, Stored tag, const typename Stored::Type* first,
                          int64_t row_stride, size_t rows, size_t depth,
                          hn::TFromD<D>* HWY_RESTRICT out) {
  using V = hn::Vec<D>;
  const size_t lanes = hn::Lanes(d);
  // x * 0 is 0 for every finite x and NaN for the rest, so sums tell: two, as
  // one would wait for each of its additions.
  V bad0 = hn::Zero(d), bad1 = hn::Zero(d);
  const auto widen = [d](V x, V& bad, hn::TFromD<D>* to) HWY_ATTR {
    const V zero = hn::Zero(d);  // GCC 12 cannot capture vectors of SVE
    if constexpr (kFinite) {
      const V zeroed = hn::Mul(x, zero);
      bad = hn::Add(bad, zeroed);
      x = hn::IfThenElseZero(hn::Eq(zeroed, zero), x);
    } else {
      bad = hn::MulAdd(x, zero, bad);
    }
    hn::StoreU(x, d, to);
  };
  for (size_t r = 0; r < rows; ++r) {
    const auto* row = first + static_cast<int64_t>(r) * row_stride;
    size_t i = 0;
    for (; i + 2 * lanes <= depth; i += 2 * lanes, out += 2 * lanes) {
      widen(LoadWide(d, tag, row + i), bad0, out);
      widen(LoadWide(d, tag, row + i + lanes), bad1, out + lanes);
    }
    if (i + lanes <= depth) {
      widen(LoadWide(d, tag, row + i), bad0, out);
      i += lanes;
      out += lanes;
    }
    if (i < depth) {
      widen(LoadWideTail(d, tag, row + i, depth - i), bad1, out);
      out += lanes;
    }
  }
  return hn::AllTrue(d, hn::Eq(hn::Add(bad0, bad1), hn::Zero(d)));
}

// Rows of an operand into lanes; this one is for one element a lane. All return
// whether all elements are finite. With finite_only those that are not become
// zeros.
template <class Op>
struct LanePacker {
  // The elements of a row side by side: ScoreStride(depth) lanes a row.
  template <class D, class Stored>
  static HWY_INLINE bool AlongRows(D d, Stored tag,
                                   const typename Stored::Type* first,
                                   int64_t row_stride, size_t rows,
                                   size_t depth, bool finite_only,
                                   typename Op::Element* HWY_RESTRICT out) {
    return finite_only
               ? WidenRows<true>(d, tag, first, row_stride, rows, depth, out)
               : WidenRows<false>(d, tag, first, row_stride, rows, depth, out);
  }
  // The elements of a column in kPerLane rows share a lane: RowStride(columns)
  // lanes for so many rows.
  template <class D, class Stored>
  static HWY_INLINE bool AcrossRows(D d, Stored tag,
                                    const typename Stored::Type* first,
                                    int64_t row_stride, size_t rows,
                                    size_t columns, bool finite_only,
                                    typename Op::Element* HWY_RESTRICT out) {
    return AlongRows(d, tag, first, row_stride, rows, columns, finite_only,
                     out);
  }
  // Whether rows are finite, without writing them. Four sums: one would wait
  // for each of its additions.
  template <class D, class Stored>
  static HWY_INLINE bool Finite(D d, Stored tag,
                                const typename Stored::Type* first,
                                int64_t row_stride, size_t rows, size_t depth) {
    using V = hn::Vec<D>;
    const size_t lanes = hn::Lanes(d);
    const V zero = hn::Zero(d);
    V bad0 = zero, bad1 = zero, bad2 = zero, bad3 = zero;
    for (size_t r = 0; r < rows; ++r) {
      const auto* row = first + static_cast<int64_t>(r) * row_stride;
      size_t i = 0;
      for (; i + 4 * lanes <= depth; i += 4 * lanes) {
        bad0 = hn::MulAdd(LoadWide(d, tag, row + i), zero, bad0);
        bad1 = hn::MulAdd(LoadWide(d, tag, row + i + lanes), zero, bad1);
        bad2 = hn::MulAdd(LoadWide(d, tag, row + i + 2 * lanes), zero, bad2);
        bad3 = hn::MulAdd(LoadWide(d, tag, row + i + 3 * lanes), zero, bad3);
      }
      for (; i + lanes <= depth; i += lanes) {
        bad0 = hn::MulAdd(LoadWide(d, tag, row + i), zero, bad0);
      }
      if (i < depth) {
        bad1 = hn::MulAdd(LoadWideTail(d, tag, row + i, depth - i), zero, bad1);
      }
    }
    const V bad = hn::Add(hn::Add(bad0, bad1), hn::Add(bad2, bad3));
    return hn::AllTrue(d, hn::Eq(bad, zero));
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
  if constexpr (kPerLane == 1) {
    if (packed == nullptr) {
      return Packer::Finite(d, tag, data, source.stride, rows, depth);
    }
  }
  if (role == Role::kScoreLeft) {
    const size_t stride = ScoreStride<Op>(d, depth);
    std::fill_n(packed + rows * stride, (padded_rows - rows) * stride,
                Element(0));
    return Packer::AlongRows(d, tag, data, source.stride, rows, depth,
                             finite_only, packed);
  }
  bool finite = true;
  // Columns [c0, c0 + columns) of all rows, summed over rows.
  const auto pack_across = [&](size_t c0, size_t columns, Element* out) {
    const size_t stride = RowStride(d, columns);
    const size_t steps = Steps<Op>(rows);
    finite &= Packer::AcrossRows(d, tag, data + c0, source.stride, rows,
                                 columns, finite_only, out);
    std::fill_n(out + steps * stride, (Steps<Op>(padded_rows) - steps) * stride,
                Element(0));
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
  for (size_t r0 = 0; r0 < padded_rows; r0 += panel) {
    const size_t width = std::min(panel, padded_rows - r0);
    if (as_they_stand && r0 + width <= rows) {
      // First, since rows in order come faster from afar than squares.
      finite &=
          Packer::Finite(d, tag, row_data(r0), source.stride, width, depth);
      Transpose(reinterpret_cast<const Element*>(row_data(r0)),
                source.stride / static_cast<int64_t>(kPerLane),
                static_cast<int64_t>(width), static_cast<int64_t>(steps),
                packed + r0 * steps, static_cast<int64_t>(width));
      continue;
    }
    for (size_t c0 = 0; c0 < steps; c0 += kStrip) {
      const size_t columns = std::min(kStrip, steps - c0);
      const size_t part = std::min(columns * kPerLane, depth - c0 * kPerLane);
      const size_t strip_columns = ScoreStride<Op>(d, part);
      const size_t given = r0 < rows ? std::min(width, rows - r0) : 0;
      if (given > 0) {
        finite &=
            Packer::AlongRows(d, tag, row_data(r0) + c0 * kPerLane,
                              source.stride, given, part, finite_only, strip);
      }
      std::fill_n(strip + given * strip_columns,
                  (width - given) * strip_columns, Element(0));
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
