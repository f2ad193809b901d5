// SPDX-License-Identifier: Apache-2.0
#include "src/attention/few_queries/buffers.h"

#include "src/attention/tensors/row_buffers.h"

namespace fa2::attention {

size_t GatheredBytes(const ConstTensorView& view, int64_t rows) {
  return HasContiguousRows(view)
             ? 0
             : static_cast<size_t>(rows * view.sizes[3]) * SizeOf(view.dtype);
}

simd::DirectRows TakeRows(int64_t rows, int64_t depth, DType accumulator,
                          threading::ScratchLayout* layout) {
  const int64_t stride = DirectStride(depth);
  return {
      layout->Take(static_cast<size_t>(rows * stride) * SizeOf(accumulator)),
      stride, rows};
}

KeyRuns::KeyRuns(const ConstTensorView& tensor, int64_t most_keys, bool sums,
                 DType accumulator, threading::ScratchLayout* layout)
    : tensor_(tensor),
      accumulator_(accumulator),
      finite_(
          TakeRows(sums ? most_keys : 0, tensor.sizes[3], accumulator, layout)),
      gathered_(layout->Take(GatheredBytes(tensor, most_keys))) {}

simd::Rows KeyRuns::Read(const TensorRows& at) const {
  return ContiguousRows(tensor_, at, gathered_);
}

int64_t KeyRuns::Following(int64_t keys) const {
  return HasContiguousRows(tensor_) ? keys : 0;
}

simd::Rows KeyRuns::Finite(const simd::DirectKernels& kernels,
                           const simd::Rows& rows) {
  if (!kernels.widen_finite(rows, finite_)) return rows;
  non_finite_ = true;
  return {finite_.data, accumulator_, finite_.stride, rows.rows, rows.depth};
}

}  // namespace fa2::attention
