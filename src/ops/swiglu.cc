// SPDX-License-Identifier: Apache-2.0

// SwiGLU, silu(gate) * up, and its backward, element by element.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fa2/training_ops.h"
#include "src/ops/arguments.h"
#include "src/ops/call.h"
#include "src/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/swiglu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "src/ops/load-inl.h"
#include "src/simd/math/exp-inl.h"

#ifndef FA2_SRC_OPS_SWIGLU_ONCE_
#define FA2_SRC_OPS_SWIGLU_ONCE_
namespace fa2::ops {

struct SwiGluJob {
  RowArray gate, up, y;     // forward
  RowArray dy, dgate, dup;  // backward, with gate and up
  bool want_dgate = false;
  bool want_dup = false;
  size_t dim = 0;
  DType dtype = DType::kF32;
  bool stream = false;  // by non-temporal stores
};

}  // namespace fa2::ops
#endif  // FA2_SRC_OPS_SWIGLU_ONCE_

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {
using simd::HWY_NAMESPACE::ExpNonPositive;

// 1 / (1 + exp(-x)), by way of exp(-|x|), which cannot overflow.
template <class D>
HWY_INLINE hn::Vec<D> Sigmoid(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1);
  const auto e = ExpNonPositive(d, hn::Neg(hn::Abs(x)));
  const auto numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
  return hn::Div(numerator, hn::Add(one, e));
}

template <typename T>
void SwiGluRowsOf(const SwiGluJob& job, RowRange rows) {
  const hn::ScalableTag<Computed<T>> d;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* HWY_RESTRICT gate = job.gate.In<T>(row);
    const T* HWY_RESTRICT up = job.up.In<T>(row);
    WriteRow(d, job.y.Out<T>(row), job.dim, job.stream,
             [&](size_t i, size_t left) HWY_ATTR {
               const auto g = LoadUpTo(d, gate + i, left);
               return hn::Mul(hn::Mul(g, Sigmoid(d, g)),
                              LoadUpTo(d, up + i, left));
             });
  }
  hwy::FlushStream();
}

void SwiGluRows(const SwiGluJob& job, RowRange rows) {
  WithElement(job.dtype, [&](auto element) {
    SwiGluRowsOf<decltype(element)>(job, rows);
  });
}

template <typename T>
void SwiGluBackwardRowsOf(const SwiGluJob& job, RowRange rows) {
  const hn::ScalableTag<Computed<T>> d;
  const auto one = hn::Set(d, 1);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* HWY_RESTRICT gate = job.gate.In<T>(row);
    const T* HWY_RESTRICT up = job.up.In<T>(row);
    const T* HWY_RESTRICT dy = job.dy.In<T>(row);
    T* HWY_RESTRICT dgate = job.want_dgate ? job.dgate.Out<T>(row) : nullptr;
    T* HWY_RESTRICT dup = job.want_dup ? job.dup.Out<T>(row) : nullptr;
    const size_t lanes = hn::Lanes(d);
    for (size_t i = 0; i < job.dim; i += lanes) {
      const size_t left = job.dim - i;
      const auto g = LoadUpTo(d, gate + i, left);
      const auto dy_lanes = LoadUpTo(d, dy + i, left);
      const auto s = Sigmoid(d, g);
      if (dup != nullptr) {
        StoreUpTo(d, hn::Mul(dy_lanes, hn::Mul(g, s)), dup + i, left);
      }
      if (dgate != nullptr) {
        const auto slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
        StoreUpTo(d,
                  hn::Mul(hn::Mul(dy_lanes, LoadUpTo(d, up + i, left)), slope),
                  dgate + i, left);
      }
    }
  }
}

void SwiGluBackwardRows(const SwiGluJob& job, RowRange rows) {
  WithElement(job.dtype, [&](auto element) {
    SwiGluBackwardRowsOf<decltype(element)>(job, rows);
  });
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/simd/target.h"

namespace fa2 {
namespace ops {
namespace {

HWY_EXPORT(SwiGluRows);
HWY_EXPORT(SwiGluBackwardRows);

using SwiGluKernel = void (*)(const SwiGluJob& job, RowRange rows);

void RunSwiGlu(const Context& context, SwiGluKernel kernel,
               const ConstTensorView& gate, SwiGluJob* job) {
  const int64_t rows = RowCount(gate);
  job->dim = static_cast<size_t>(gate.sizes[3]);
  if (rows == 0 || job->dim == 0) return;
  job->dtype = gate.dtype;
  job->stream = WriteNonTemporal(Bytes(gate));
  ForRows(context, rows, RowsPerItem(gate.sizes[3], gate.dtype),
          [kernel, job](RowRange range, int64_t /*item*/, int /*worker*/) {
            kernel(*job, range);
          });
}

Status Forward(const ConstTensorView& gate, const ConstTensorView& up,
               const TensorView& y, const Context& context) {
  FA2_RETURN_IF_ERROR(CheckRows({"gate", gate}, kFloats));
  FA2_RETURN_IF_ERROR(CheckRowsLike({"up", up}, {"gate", gate}));
  FA2_RETURN_IF_ERROR(CheckRowsLike({"y", y}, {"gate", gate}));
  FA2_RETURN_IF_ERROR(CheckOverlap({{"y", y}}, {{"gate", gate}, {"up", up}}));
  SwiGluJob job;
  job.gate = RowArray(gate);
  job.up = RowArray(up);
  job.y = RowArray(y);
  RunSwiGlu(context, FA2_TARGET_FUNCTION(SwiGluRows, context.impl().targets()),
            gate, &job);
  return Status::Ok();
}

Status Backward(const SwiGluBackwardArgs& args, const Context& context) {
  const NamedView gate{"gate", args.gate};
  const NamedView dgate{"dgate", args.dgate};
  const NamedView dup{"dup", args.dup};
  FA2_RETURN_IF_ERROR(CheckRows(gate, kFloats));
  FA2_RETURN_IF_ERROR(CheckRowsLike({"dy", args.dy}, gate));
  FA2_RETURN_IF_ERROR(CheckRowsLike({"up", args.up}, gate));
  for (const NamedView* out : {&dgate, &dup}) {
    if (out->view.given()) FA2_RETURN_IF_ERROR(CheckRowsLike(*out, gate));
  }
  FA2_RETURN_IF_ERROR(
      CheckOverlap({dgate, dup}, {{"dy", args.dy}, gate, {"up", args.up}}));
  SwiGluJob job;
  job.gate = RowArray(args.gate);
  job.up = RowArray(args.up);
  job.dy = RowArray(args.dy);
  job.want_dgate = dgate.view.given();
  job.want_dup = dup.view.given();
  if (job.want_dgate) job.dgate = RowArray(dgate.view);
  if (job.want_dup) job.dup = RowArray(dup.view);
  RunSwiGlu(context,
            FA2_TARGET_FUNCTION(SwiGluBackwardRows, context.impl().targets()),
            args.gate, &job);
  return Status::Ok();
}

}  // namespace
}  // namespace ops

Status SwiGlu(const ConstTensorView& gate, const ConstTensorView& up,
              const TensorView& y, Context* given) {
  return ops::Call("swiglu", gate, given, [&](Context& context) {
    return ops::Forward(gate, up, y, context);
  });
}

Status SwiGluBackward(const SwiGluBackwardArgs& args, Context* given) {
  return ops::Call("swiglu_backward", args.gate, given, [&](Context& context) {
    return ops::Backward(args, context);
  });
}

}  // namespace fa2
#endif  // HWY_ONCE
