// SPDX-License-Identifier: Apache-2.0

// Dense arrays of four dimensions that the checker computes with.
#ifndef FA2_SRC_VERIFY_MODEL_ARRAY4_H_
#define FA2_SRC_VERIFY_MODEL_ARRAY4_H_

#include <array>
#include <cstdint>
#include <vector>

#include "fa2/types.h"

namespace fa2::verify {

using Sizes = std::array<int64_t, 4>;

template <class T>
struct Array4 {
  Sizes sizes = {0, 0, 0, 0};
  std::vector<T> values;

  Array4() = default;
  explicit Array4(const Sizes& n)
      : sizes(n), values(static_cast<size_t>(n[0] * n[1] * n[2] * n[3])) {}

  bool given() const { return sizes[0] * sizes[1] * sizes[2] * sizes[3] > 0; }
  int64_t offset(int64_t a, int64_t b, int64_t c) const {
    return ((a * sizes[1] + b) * sizes[2] + c) * sizes[3];
  }
  T* row(int64_t a, int64_t b, int64_t c) {
    return values.data() + offset(a, b, c);
  }
  const T* row(int64_t a, int64_t b, int64_t c) const {
    return values.data() + offset(a, b, c);
  }
};

// Of Array4<double>; not given where it has no elements.
inline TensorView ViewOf(Array4<double>& array) {
  return {array.given() ? array.values.data() : nullptr, DType::kF64,
          array.sizes, DenseStrides(array.sizes)};
}
inline ConstTensorView ViewOf(const Array4<double>& array) {
  return {array.given() ? array.values.data() : nullptr, DType::kF64,
          array.sizes, DenseStrides(array.sizes)};
}

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_ARRAY4_H_
