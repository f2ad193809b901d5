// SPDX-License-Identifier: Apache-2.0

// A tensor of a file as what it means, [B, H, N, D], whatever its layout.
#ifndef FA2_SRC_VERIFY_MODEL_LOGICAL_TENSOR_H_
#define FA2_SRC_VERIFY_MODEL_LOGICAL_TENSOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fa2/types.h"
#include "src/verify/cases/case.h"
#include "src/verify/model/array4.h"

namespace fa2::verify {

// Logical [B, H, N, D] (statistics [B, H, N, 1]), and the file's dimension that
// each of the four stands for (-1: none).
struct LogicalTensor {
  ConstTensorView view;
  std::array<int, 4> file_dimension = {-1, -1, -1, -1};
  size_t rank = 0;

  bool given() const { return view.data != nullptr; }
  // An index in the file's own dimensions.
  std::vector<int64_t> FileIndex(const Sizes& at) const;
};

// Sets a logical dimension for each of the file's.
LogicalTensor Arrange(const Array& array, const std::vector<int>& logical);

// All of it in f64, dense.
Array4<double> Load(const LogicalTensor& tensor);

// Element of a logical tensor; sizes of 1 broadcast.
double Get(const ConstTensorView& view, const Sizes& at);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_LOGICAL_TENSOR_H_
