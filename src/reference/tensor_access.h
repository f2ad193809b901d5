// SPDX-License-Identifier: Apache-2.0

// Single elements of strided views as double, whatever their dtype.
#ifndef FA2_SRC_REFERENCE_TENSOR_ACCESS_H_
#define FA2_SRC_REFERENCE_TENSOR_ACCESS_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "fa2/types.h"
#include "src/common/half.h"

namespace fa2::reference {

// Elements between (0,0,0,0) and (a,b,c,d), where a dimension of size 1
// broadcasts: it takes any index.
inline int64_t OffsetOf(const ConstTensorView& view, int64_t a, int64_t b,
                        int64_t c, int64_t d) {
  const int64_t index[4] = {a, b, c, d};
  int64_t offset = 0;
  for (int i = 0; i < 4; ++i) {
    if (view.sizes[i] != 1) offset += index[i] * view.strides[i];
  }
  return offset;
}

template <class T>
T ElementAs(const void* data, int64_t offset) {
  T value;
  std::memcpy(&value, static_cast<const T*>(data) + offset, sizeof(T));
  return value;
}

inline double LoadAt(const void* data, DType dtype, int64_t offset) {
  switch (dtype) {
    case DType::kF32:
      return ElementAs<float>(data, offset);
    case DType::kBF16:
      return Bf16ToF32(ElementAs<uint16_t>(data, offset));
    case DType::kF16:
      return F16ToF32(ElementAs<uint16_t>(data, offset));
    case DType::kF64:
      return ElementAs<double>(data, offset);
    case DType::kBool:
      return ElementAs<uint8_t>(data, offset) != 0;
    case DType::kI32:
      return ElementAs<int32_t>(data, offset);
    case DType::kI64:
      return static_cast<double>(ElementAs<int64_t>(data, offset));
    case DType::kU8:
      return ElementAs<uint8_t>(data, offset);
  }
  return 0.0;
}

inline double Load(const ConstTensorView& view, int64_t a, int64_t b, int64_t c,
                   int64_t d) {
  return LoadAt(view.data, view.dtype, OffsetOf(view, a, b, c, d));
}

// Rounds once, from double to the view's dtype (a float type).
inline void Store(const TensorView& view, int64_t a, int64_t b, int64_t c,
                  int64_t d, double value) {
  const int64_t offset = OffsetOf(view, a, b, c, d);
  switch (view.dtype) {
    case DType::kF32:
      static_cast<float*>(view.data)[offset] = static_cast<float>(value);
      break;
    case DType::kBF16:
      static_cast<uint16_t*>(view.data)[offset] = F64ToBf16(value);
      break;
    case DType::kF16:
      static_cast<uint16_t*>(view.data)[offset] = F64ToF16(value);
      break;
    case DType::kF64:
      static_cast<double*>(view.data)[offset] = value;
      break;
    case DType::kBool:
    case DType::kI32:
    case DType::kI64:
    case DType::kU8:
      break;
  }
}

// A dense matrix of doubles.
struct Matrix {
  Matrix(int64_t rows, int64_t columns)
      : columns(columns), values(static_cast<size_t>(rows * columns)) {}
  double* row(int64_t i) { return values.data() + i * columns; }
  const double* row(int64_t i) const { return values.data() + i * columns; }

  int64_t columns;
  std::vector<double> values;
};

// Rows [begin, begin + rows) of one head of a [B, H, N, D] tensor.
inline Matrix LoadRows(const ConstTensorView& view, int64_t batch, int64_t head,
                       int64_t begin, int64_t rows) {
  Matrix matrix(rows, view.sizes[3]);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < matrix.columns; ++d) {
      matrix.row(i)[d] = Load(view, batch, head, begin + i, d);
    }
  }
  return matrix;
}

// The reverse; with `accumulate`, adds to what the tensor holds.
inline void StoreRows(const Matrix& matrix, bool accumulate,
                      const TensorView& view, int64_t batch, int64_t head,
                      int64_t begin, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < matrix.columns; ++d) {
      double value = matrix.row(i)[d];
      if (accumulate) value += Load(view, batch, head, begin + i, d);
      Store(view, batch, head, begin + i, d, value);
    }
  }
}

}  // namespace fa2::reference

#endif  // FA2_SRC_REFERENCE_TENSOR_ACCESS_H_
