// SPDX-License-Identifier: Apache-2.0
#include "src/verify/model/logical_tensor.h"

#include "src/reference/tensor_access.h"

namespace fa2::verify {

std::vector<int64_t> LogicalTensor::FileIndex(const Sizes& at) const {
  std::vector<int64_t> index(rank, 0);
  for (size_t l = 0; l < 4; ++l) {
    if (file_dimension[l] >= 0) {
      index[static_cast<size_t>(file_dimension[l])] = at[l];
    }
  }
  return index;
}

LogicalTensor Arrange(const Array& array, const std::vector<int>& logical) {
  LogicalTensor tensor;
  tensor.rank = array.shape.size();
  tensor.view.data = array.data;
  tensor.view.dtype = array.dtype;
  tensor.view.sizes = {1, 1, 1, 1};
  int64_t stride = 1;
  for (size_t d = array.shape.size(); d-- > 0;) {
    const auto l = static_cast<size_t>(logical[d]);
    tensor.view.sizes[l] = array.shape[d];
    tensor.view.strides[l] = stride;
    tensor.file_dimension[l] = static_cast<int>(d);
    stride *= array.shape[d];
  }
  return tensor;
}

Array4<double> Load(const LogicalTensor& tensor) {
  const ConstTensorView& view = tensor.view;
  Array4<double> array(view.sizes);
  double* to = array.values.data();
  for (int64_t a = 0; a < view.sizes[0]; ++a) {
    for (int64_t b = 0; b < view.sizes[1]; ++b) {
      for (int64_t c = 0; c < view.sizes[2]; ++c) {
        const int64_t offset = reference::OffsetOf(view, a, b, c, 0);
        const int64_t step = view.sizes[3] == 1 ? 0 : view.strides[3];
        for (int64_t d = 0; d < view.sizes[3]; ++d) {
          *to++ = reference::LoadAt(view.data, view.dtype, offset + d * step);
        }
      }
    }
  }
  return array;
}

double Get(const ConstTensorView& view, const Sizes& at) {
  return reference::Load(view, at[0], at[1], at[2], at[3]);
}

}  // namespace fa2::verify
