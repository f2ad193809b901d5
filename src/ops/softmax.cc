// SPDX-License-Identifier: Apache-2.0

// Softmax and its backward by rows.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fa2/training_ops.h"
#include "src/context/context_impl.h"
#include "src/ops/arguments.h"
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

void RunSoftmax(const Context& context, SoftmaxKernel kernel,
                const ConstTensorView& shape, SoftmaxJob* job) {
  const int64_t rows = RowCount(shape);
  job->rows = rows;
  job->dim = static_cast<size_t>(shape.sizes[3]);
  if (rows == 0 || job->dim == 0) return;
  job->dtype = shape.dtype;
  job->stream = WriteNonTemporal(Elements(shape) *
                                 static_cast<int64_t>(SizeOf(shape.dtype)));
  const int64_t step = PipelinedRowsPerItem(
      rows, shape.sizes[3], shape.dtype, context.impl().pool().num_threads());
  context.impl().pool().For(
      CeilDiv(rows, step), [kernel, job, step, rows](int64_t item, int worker) {
        kernel(*job, ItemRows(item, step, rows), worker);
      });
}

}  // namespace
}  // namespace ops

Status Softmax(const ConstTensorView& x, const TensorView& y, Context* given) {
  using namespace ops;
  return WithContext(given, [&](Context* context) -> Status {
    Status status = CheckRows({"x", x}, kFloats);
    if (status.ok()) status = CheckRows({"y", y}, kFloats);
    if (status.ok()) status = CheckType({"y", y}, {"x", x});
    if (status.ok()) status = CheckShape({"y", y}, x.sizes, "the shape of x");
    if (status.ok()) status = CheckOverlap({{"y", y}}, {{"x", x}});
    if (!status.ok() || Elements(x) == 0) return status;
    SoftmaxJob job;
    job.x = RowArray(x);
    job.y = RowArray(y);
    threading::Workspace workspace;
    status = context->impl().workspaces().Acquire(
        ExpScratch(static_cast<size_t>(x.sizes[3])) * ComputedSize(x.dtype) *
            static_cast<size_t>(context->impl().pool().num_threads()),
        &workspace);
    if (!status.ok()) return status;
    job.scratch = workspace.data();
    RunSoftmax(*context,
               FA2_TARGET_FUNCTION(SoftmaxRows, context->impl().targets()), x,
               &job);
    return status;
  });
}

Status SoftmaxBackward(const ConstTensorView& dy, const ConstTensorView& y,
                       const TensorView& dx, Context* given) {
  using namespace ops;
  return WithContext(given, [&](Context* context) -> Status {
    Status status = CheckRows({"y", y}, kFloats);
    for (const NamedView& other : {NamedView{"dy", dy}, NamedView{"dx", dx}}) {
      if (status.ok()) status = CheckRows(other, kFloats);
      if (status.ok()) status = CheckType(other, {"y", y});
      if (status.ok()) status = CheckShape(other, y.sizes, "the shape of y");
    }
    if (status.ok())
      status = CheckOverlap({{"dx", dx}}, {{"dy", dy}, {"y", y}});
    if (!status.ok()) return status;
    SoftmaxJob job;
    job.y = RowArray(y);
    job.dy = RowArray(dy);
    job.dx = RowArray(dx);
    RunSoftmax(
        *context,
        FA2_TARGET_FUNCTION(SoftmaxBackwardRows, context->impl().targets()), y,
        &job);
    return status;
  });
}

}  // namespace fa2
#endif  // HWY_ONCE
