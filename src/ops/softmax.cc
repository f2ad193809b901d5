// SPDX-License-Identifier: Apache-2.0

// Softmax and its backward by rows.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fa2/training_ops.h"
#include "src/ops/arguments.h"
#include "src/ops/call.h"
#include "src/ops/row_exp_scratch.h"
#include "src/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/softmax.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "src/ops/load-inl.h"
#include "src/ops/row_exp-inl.h"

#ifndef FA2_SRC_OPS_SOFTMAX_ONCE_
#define FA2_SRC_OPS_SOFTMAX_ONCE_
namespace fa2::ops {

struct SoftmaxJob {
  RowArray x, y;    // forward
  RowArray dy, dx;  // backward, with y
  int64_t rows = 0;
  size_t dim = 0;
  std::byte* scratch = nullptr;  // forward: ExpScratch(dim) numbers a worker
  DType dtype = DType::kF32;
  bool stream = false;  // by non-temporal stores
};

}  // namespace fa2::ops
#endif  // FA2_SRC_OPS_SOFTMAX_ONCE_

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {

template <typename T>
void SoftmaxRowsOf(const SoftmaxJob& job, RowRange rows, Computed<T>* scratch) {
  const hn::ScalableTag<Computed<T>> d;
  ScaledRow<T> last;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* next = job.x.In<T>(std::min(row + 1, job.rows - 1));
    const auto sum =
        SumExpOfRow(d, job.x.In<T>(row), job.dim, next, scratch, last);
    last = {job.y.Out<T>(row), sum.max, 1.0 / sum.sum, 0, job.stream};
  }
  WriteScaledRow(d, scratch, job.dim, last);
  hwy::FlushStream();
}

void SoftmaxRows(const SoftmaxJob& job, RowRange rows, int worker) {
  WithElement(job.dtype, [&](auto element) {
    using T = decltype(element);
    SoftmaxRowsOf<T>(job, rows,
                     reinterpret_cast<Computed<T>*>(job.scratch) +
                         static_cast<size_t>(worker) * ExpScratch(job.dim));
  });
}

template <typename T>
void SoftmaxBackwardRowsOf(const SoftmaxJob& job, RowRange rows) {
  const hn::ScalableTag<Computed<T>> d;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* HWY_RESTRICT y = job.y.In<T>(row);
    const T* HWY_RESTRICT dy = job.dy.In<T>(row);
    const int64_t next = std::min(row + 1, job.rows - 1);
    const T* HWY_RESTRICT next_y = job.y.In<T>(next);
    const T* HWY_RESTRICT next_dy = job.dy.In<T>(next);
    // Each pass fetches one of the next row's arrays, so that memory is busy in
    // both.
    const double sum = SumRow(d, job.dim, [&](size_t i, size_t left) HWY_ATTR {
      PrefetchToL2(next_y + i);
      return hn::Mul(LoadUpTo(d, y + i, left), LoadUpTo(d, dy + i, left));
    });
    const auto mean = hn::Set(d, static_cast<Computed<T>>(sum));
    WriteRow(d, job.dx.Out<T>(row), job.dim, job.stream,
             [&](size_t i, size_t left) HWY_ATTR {
               PrefetchToL2(next_dy + i);
               return hn::Mul(LoadUpTo(d, y + i, left),
                              hn::Sub(LoadUpTo(d, dy + i, left), mean));
             });
  }
  hwy::FlushStream();
}

void SoftmaxBackwardRows(const SoftmaxJob& job, RowRange rows, int) {
  WithElement(job.dtype, [&](auto element) {
    SoftmaxBackwardRowsOf<decltype(element)>(job, rows);
  });
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/simd/target.h"

namespace fa2 {
namespace ops {
namespace {

HWY_EXPORT(SoftmaxRows);
HWY_EXPORT(SoftmaxBackwardRows);

using SoftmaxKernel = void (*)(const SoftmaxJob& job, RowRange rows,
                               int worker);

// Over all rows of `shape`.
void RunSoftmax(const Context& context, SoftmaxKernel kernel,
                const ConstTensorView& shape, SoftmaxJob* job) {
  const int64_t rows = RowCount(shape);
  job->rows = rows;
  job->dim = static_cast<size_t>(shape.sizes[3]);
  if (rows == 0 || job->dim == 0) return;
  job->dtype = shape.dtype;
  job->stream = WriteNonTemporal(Bytes(shape));
  const int64_t step = PipelinedRowsPerItem(
      rows, shape.sizes[3], shape.dtype, context.impl().pool().num_threads());
  ForRows(context, rows, step,
          [kernel, job](RowRange range, int64_t /*item*/, int worker) {
            kernel(*job, range, worker);
          });
}

Status Forward(const ConstTensorView& x, const TensorView& y,
               Context& context) {
  FA2_RETURN_IF_ERROR(CheckRows({"x", x}, kFloats));
  FA2_RETURN_IF_ERROR(CheckRowsLike({"y", y}, {"x", x}));
  FA2_RETURN_IF_ERROR(CheckOverlap({{"y", y}}, {{"x", x}}));
  if (Elements(x) == 0) return Status::Ok();
  SoftmaxJob job;
  job.x = RowArray(x);
  job.y = RowArray(y);
  threading::Workspace workspace;
  FA2_RETURN_IF_ERROR(context.impl().workspaces().Acquire(
      ExpScratch(static_cast<size_t>(x.sizes[3])) * ComputedSize(x.dtype) *
          static_cast<size_t>(context.impl().pool().num_threads()),
      &workspace));
  job.scratch = workspace.data();
  RunSoftmax(context,
             FA2_TARGET_FUNCTION(SoftmaxRows, context.impl().targets()), x,
             &job);
  return Status::Ok();
}

Status Backward(const ConstTensorView& dy, const ConstTensorView& y,
                const TensorView& dx, Context& context) {
  FA2_RETURN_IF_ERROR(CheckRows({"y", y}, kFloats));
  FA2_RETURN_IF_ERROR(CheckRowsLike({"dy", dy}, {"y", y}));
  FA2_RETURN_IF_ERROR(CheckRowsLike({"dx", dx}, {"y", y}));
  FA2_RETURN_IF_ERROR(CheckOverlap({{"dx", dx}}, {{"dy", dy}, {"y", y}}));
  SoftmaxJob job;
  job.y = RowArray(y);
  job.dy = RowArray(dy);
  job.dx = RowArray(dx);
  RunSoftmax(context,
             FA2_TARGET_FUNCTION(SoftmaxBackwardRows, context.impl().targets()),
             y, &job);
  return Status::Ok();
}

}  // namespace
}  // namespace ops

Status Softmax(const ConstTensorView& x, const TensorView& y, Context* given) {
  return ops::Call("softmax", x, given, [&](Context& context) {
    return ops::Forward(x, y, context);
  });
}

Status SoftmaxBackward(const ConstTensorView& dy, const ConstTensorView& y,
                       const TensorView& dx, Context* given) {
  return ops::Call("softmax_backward", y, given, [&](Context& context) {
    return ops::Backward(dy, y, dx, context);
  });
}

}  // namespace fa2
#endif  // HWY_ONCE
