// Packing of operands whose elements are full lanes (f32, f64). Layouts, with
// W = PanelWidth(d) and every dimension padded with zeros:
//   kScoreLeft, kGradLeft  [row][LeftStride(depth)]
//   kScoreRight            [row / W][depth][W]
//   kGradRight             [depth / W][row][W]; the last panel is only as many
//                          whole vectors wide as it needs

// Per-target include guard.
#if defined(FA2_SRC_SIMD_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_PACK_INL_H_
#undef FA2_SRC_SIMD_PACK_INL_H_
#else
#define FA2_SRC_SIMD_PACK_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/engine.h"
#include "src/simd/load-inl.h"
#include "src/simd/register_block-inl.h"

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

// Whole vectors, so that a row can be written without a tail.
template <class D>
HWY_INLINE size_t LeftStride(D d, size_t depth) {
  return RoundUp(depth, hn::Lanes(d));
}

// Writes one row to `out` (LeftStride(depth) elements, zeros past depth).
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

// [rows][stride] -> [columns][width]: one panel of kScoreRight.
template <typename T>
HWY_INLINE void TransposePanel(const T* HWY_RESTRICT rows, size_t stride,
                               size_t columns, size_t width,
                               T* HWY_RESTRICT out) {
  // 8 columns at a time keep the reads of a cache line together.
  constexpr size_t kColumns = 8;
  for (size_t c0 = 0; c0 < columns; c0 += kColumns) {
    const size_t count = std::min(kColumns, columns - c0);
    for (size_t r = 0; r < width; ++r) {
      const T* HWY_RESTRICT in = rows + r * stride + c0;
      for (size_t c = 0; c < count; ++c) out[(c0 + c) * width + r] = in[c];
    }
  }
}

template <class D>
HWY_INLINE size_t PackedBytesOf(D d, Role role, size_t rows, size_t depth) {
  using T = hn::TFromD<D>;
  const size_t elements = role == Role::kScoreRight
                              ? RoundUp(rows, PanelWidth(d)) * depth
                              : rows * LeftStride(d, depth);
  return elements * sizeof(T);
}

template <class D, class Stored>
HWY_INLINE bool PackRows(D d, Stored tag, Role role, const Rows& source,
                         size_t padded_rows, bool finite_only,
                         hn::TFromD<D>* HWY_RESTRICT packed) {
  using T = hn::TFromD<D>;
  const size_t lanes = hn::Lanes(d);
  const size_t depth = static_cast<size_t>(source.depth);
  const size_t rows = static_cast<size_t>(source.rows);
  const size_t stride = LeftStride(d, depth);
  const size_t width = PanelWidth(d);
  const auto* data = static_cast<const typename Stored::Type*>(source.data);
  const auto row_data = [&](size_t r) {
    return data + static_cast<int64_t>(r) * source.stride;
  };
  bool finite = true;
  if (role == Role::kScoreLeft || role == Role::kGradLeft) {
    for (size_t r = 0; r < padded_rows; ++r) {
      T* out = packed + r * stride;
      if (r < rows) {
        finite &= WidenRow(d, tag, row_data(r), depth, finite_only, out);
      } else {
        std::fill_n(out, stride, T(0));
      }
    }
    return finite;
  }
  // Both right-hand roles go through a strip of whole-row vectors: a panel of
  // columns for kGradRight, a panel of rows for kScoreRight. 64 columns by 64
  // rows of f32 are 16 KiB, half of L1.
  constexpr size_t kStrip = 64;
  constexpr size_t kMaxWidth = kBlockVectors * kMaxVectorBytes / sizeof(T);
  HWY_ALIGN T strip[kStrip * kMaxWidth];
  if (role == Role::kScoreRight) {
    const size_t strip_columns = RoundUp(kStrip, lanes);
    for (size_t r0 = 0; r0 < padded_rows; r0 += width) {
      for (size_t c0 = 0; c0 < depth; c0 += kStrip) {
        const size_t columns = std::min(kStrip, depth - c0);
        for (size_t r = 0; r < width; ++r) {
          T* out = strip + r * strip_columns;
          if (r0 + r < rows) {
            finite &= WidenRow(d, tag, row_data(r0 + r) + c0, columns,
                               finite_only, out);
          } else {
            std::fill_n(out, strip_columns, T(0));
          }
        }
        TransposePanel(strip, strip_columns, columns, width,
                       packed + r0 * depth + c0 * width);
      }
    }
    return finite;
  }
  for (size_t c0 = 0; c0 < depth; c0 += width) {
    const size_t columns = std::min(width, depth - c0);
    const size_t panel_width = RoundUp(columns, lanes);
    T* panel = packed + c0 * padded_rows;
    for (size_t r = 0; r < padded_rows; ++r) {
      T* out = panel + r * panel_width;
      if (r < rows) {
        finite &= WidenRow(d, tag, row_data(r) + c0, columns, finite_only, out);
      } else {
        std::fill_n(out, panel_width, T(0));
      }
    }
  }
  return finite;
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
