// SPDX-License-Identifier: Apache-2.0

// Checks of the arguments of the training kernels, beside those that attention
// has too. Each returns ok, or the sentence that the caller gets to see.
#ifndef FA2_SRC_OPS_ARGUMENTS_H_
#define FA2_SRC_OPS_ARGUMENTS_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "fa2/status.h"
#include "fa2/types.h"
#include "src/checks/views.h"

namespace fa2::ops {

using checks::CheckOverlap;
using checks::CheckShape;
using checks::NamedView;
using checks::ShapeText;

inline int64_t Elements(const ConstTensorView& view) {
  return view.sizes[0] * view.sizes[1] * view.sizes[2] * view.sizes[3];
}

// Number of rows: all dimensions but the last.
inline int64_t RowCount(const ConstTensorView& view) {
  return view.sizes[0] * view.sizes[1] * view.sizes[2];
}

inline int64_t Bytes(const ConstTensorView& view) {
  return Elements(view) * static_cast<int64_t>(SizeOf(view.dtype));
}

// What training kernels compute with.
inline constexpr std::initializer_list<DType> kFloats = {
    DType::kF32, DType::kBF16, DType::kF16, DType::kF64};

// A view that fits into memory, of one of the types, the elements of a row
// contiguous.
Status CheckRows(const NamedView& x, std::initializer_list<DType> types);

// A view that fits into memory, of one of the types, and [1, 1, 1, n].
Status CheckVector(const NamedView& x, std::initializer_list<DType> types,
                   int64_t n);

// x has the type of `like`.
Status CheckType(const NamedView& x, const NamedView& like);

// Rows of a floating-point type, with the type and shape of `like`.
Status CheckRowsLike(const NamedView& x, const NamedView& like);

// Every element of a vector of i32 or i64 is in [0, limit), or is `ignored`.
// `*counted` is the number of those in [0, limit).
Status CheckIndices(const NamedView& x, int64_t limit, const char* limit_name,
                    std::optional<int64_t> ignored, int64_t* counted);

// Element i of a vector of i32 or i64.
inline int64_t IndexAt(const ConstTensorView& x, int64_t i) {
  const int64_t at = i * x.strides[3];
  return x.dtype == DType::kI32 ? static_cast<const int32_t*>(x.data)[at]
                                : static_cast<const int64_t*>(x.data)[at];
}

}  // namespace fa2::ops

#endif  // FA2_SRC_OPS_ARGUMENTS_H_
