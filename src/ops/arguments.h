// Checks of the arguments of the training kernels. Each returns ok, or the
// sentence that the caller gets to see.
#ifndef FA2_SRC_OPS_ARGUMENTS_H_
#define FA2_SRC_OPS_ARGUMENTS_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "fa2/status.h"
#include "fa2/types.h"

namespace fa2::ops {

struct NamedView {
  const char* name;
  const ConstTensorView& view;
};

inline int64_t Elements(const ConstTensorView& view) {
  return view.sizes[0] * view.sizes[1] * view.sizes[2] * view.sizes[3];
}

// Number of rows: all dimensions but the last.
inline int64_t RowCount(const ConstTensorView& view) {
  return view.sizes[0] * view.sizes[1] * view.sizes[2];
}

// What training kernels compute with.
inline constexpr std::initializer_list<DType> kFloats = {
    DType::kF32, DType::kBF16, DType::kF16, DType::kF64};

// "[1, 1, 3, 4]".
std::string ShapeText(const std::array<int64_t, 4>& sizes);

// Sizes >= 0 and small enough to address, data given and aligned unless there
// are no elements, one of the types.
Status CheckView(const NamedView& x, std::initializer_list<DType> types);

// CheckView, and the elements of a row are contiguous.
Status CheckRows(const NamedView& x, std::initializer_list<DType> types);

// CheckView, and [1, 1, 1, n].
Status CheckVector(const NamedView& x, std::initializer_list<DType> types,
                   int64_t n);

Status CheckShape(const NamedView& x, const std::array<int64_t, 4>& sizes,
                  const char* shape_of);
Status CheckType(const NamedView& x, const NamedView& like);

// No element of an output lies in an input, in another output, or twice in the
// same output. Views that are not given may be passed.
Status CheckOverlap(std::initializer_list<NamedView> outputs,
                    std::initializer_list<NamedView> inputs);

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
