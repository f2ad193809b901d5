// SPDX-License-Identifier: Apache-2.0

// RMS norm and its backward by rows. The gradient of the weight is a sum over
// rows: rows are cut into pieces that do not depend on the number of threads,
// each piece sums into an array of its own, and those are added in order.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "fa2/training_ops.h"
#include "src/ops/arguments.h"
#include "src/ops/call.h"
#include "src/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/rms_norm.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "src/ops/load-inl.h"

#ifndef FA2_SRC_OPS_RMS_NORM_ONCE_
#define FA2_SRC_OPS_RMS_NORM_ONCE_
namespace fa2::ops {

struct RmsNormJob {
  RowArray x, y, dy, dx;
  const void* weight = nullptr;
  void* dweight = nullptr;
  int64_t rows = 0;
  size_t dim = 0;
  double eps = 0.0;
  DType dtype = DType::kF32;
  DType weight_dtype = DType::kF32;   // dtype or f32
  DType dweight_dtype = DType::kF32;  // dtype or f32
  bool accumulate_dweight = false;
  bool want_dx = false;
  bool stream = false;  // by non-temporal stores
  // [pieces][partial_stride] of what the kernel computes in: sums of each
  // piece. nullptr: no dweight.
  std::byte* partial = nullptr;
  int64_t pieces = 0;
  size_t partial_stride = 0;
};

}  // namespace fa2::ops
#endif  // FA2_SRC_OPS_RMS_NORM_ONCE_

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {

template <typename T>
HWY_INLINE double ReciprocalRms(const T* HWY_RESTRICT x, size_t dim,
                                double eps) {
  const hn::ScalableTag<Computed<T>> d;
  const double sum = SumRow(d, dim, [&](size_t i, size_t left) HWY_ATTR {
    const auto v = LoadUpTo(d, x + i, left);
    return hn::Mul(v, v);
  });
  return 1.0 / std::sqrt(sum / static_cast<double>(dim) + eps);
}

// Both passes over a row but the first find it in the cache; while the last one
// writes, the next row is fetched, so that memory never waits.
template <typename T, typename W>
void ForwardRows(const RmsNormJob& job, RowRange rows) {
  const hn::ScalableTag<Computed<T>> d;
  const W* HWY_RESTRICT weight = static_cast<const W*>(job.weight);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* HWY_RESTRICT x = job.x.In<T>(row);
    const T* HWY_RESTRICT next = job.x.In<T>(std::min(row + 1, job.rows - 1));
    const auto r = hn::Set(
        d, static_cast<Computed<T>>(ReciprocalRms(x, job.dim, job.eps)));
    WriteRow(d, job.y.Out<T>(row), job.dim, job.stream,
             [&](size_t i, size_t left) HWY_ATTR {
               PrefetchToL2(next + i);
               return hn::Mul(hn::Mul(LoadUpTo(d, x + i, left), r),
                              LoadUpTo(d, weight + i, left));
             });
  }
  hwy::FlushStream();
}

void RmsNormRows(const RmsNormJob& job, RowRange rows) {
  WithElements(job.dtype, job.weight_dtype, [&](auto x, auto weight) {
    ForwardRows<decltype(x), decltype(weight)>(job, rows);
  });
}

// Sums over a row that do not need each other, so one pass makes both.
struct RowSums {
  double xx = 0.0;   // x^2
  double xwg = 0.0;  // x * weight * dy
};

// Adds one chunk of columns of one row: f32 within it, f64 from call to call.
// Fetches x of row `next`; BackwardChunk fetches its dy, so that memory is busy
// in both passes.
template <typename T, typename W>
HWY_INLINE void AddToSums(const RmsNormJob& job, int64_t row, int64_t next,
                          size_t chunk, size_t n, RowSums* sums) {
  const hn::ScalableTag<Computed<T>> d;
  const T* HWY_RESTRICT x = job.x.In<T>(row) + chunk;
  const T* HWY_RESTRICT dy = job.dy.In<T>(row) + chunk;
  const T* HWY_RESTRICT next_x = job.x.In<T>(next) + chunk;
  const W* HWY_RESTRICT weight = static_cast<const W*>(job.weight) + chunk;
  const size_t lanes = hn::Lanes(d);
  auto xx0 = hn::Zero(d);
  auto xx1 = hn::Zero(d);
  auto xwg0 = hn::Zero(d);
  auto xwg1 = hn::Zero(d);
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    PrefetchToL2(next_x + i);
    PrefetchToL2(next_x + i + lanes);
    const auto x0 = LoadVector(d, x + i);
    const auto x1 = LoadVector(d, x + i + lanes);
    const auto wg0 = hn::Mul(LoadVector(d, weight + i), LoadVector(d, dy + i));
    const auto wg1 = hn::Mul(LoadVector(d, weight + i + lanes),
                             LoadVector(d, dy + i + lanes));
    xx0 = hn::MulAdd(x0, x0, xx0);
    xx1 = hn::MulAdd(x1, x1, xx1);
    xwg0 = hn::MulAdd(x0, wg0, xwg0);
    xwg1 = hn::MulAdd(x1, wg1, xwg1);
  }
  for (; i < n; i += lanes) {
    const auto v = LoadUpTo(d, x + i, n - i);
    const auto wg =
        hn::Mul(LoadUpTo(d, weight + i, n - i), LoadUpTo(d, dy + i, n - i));
    xx0 = hn::MulAdd(v, v, xx0);
    xwg0 = hn::MulAdd(v, wg, xwg0);
  }
  sums->xx +=
      static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(xx0, xx1))));
  sums->xwg +=
      static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(xwg0, xwg1))));
}

// One chunk of columns of one row: dx, and the row's part of dweight. Fetches
// dy of row `next`.
template <typename T, typename W>
HWY_INLINE void BackwardChunk(const RmsNormJob& job, int64_t row, int64_t next,
                              const RowSums& sums, size_t chunk, size_t n,
                              Computed<T>* HWY_RESTRICT partial) {
  const hn::ScalableTag<Computed<T>> d;
  const auto dim = static_cast<double>(job.dim);
  const T* HWY_RESTRICT x = job.x.In<T>(row) + chunk;
  const T* HWY_RESTRICT dy = job.dy.In<T>(row) + chunk;
  const T* HWY_RESTRICT next_dy = job.dy.In<T>(next) + chunk;
  const W* HWY_RESTRICT weight = static_cast<const W*>(job.weight) + chunk;
  const double rms = 1.0 / std::sqrt(sums.xx / dim + job.eps);
  const auto r = hn::Set(d, static_cast<Computed<T>>(rms));
  // Lanes past the row add x * r * dy with x = dy = 0, into padding or, at
  // an unaligned start, into columns that hold the same NaN if r is NaN.
  const auto add_to_dweight = [&](size_t i, hn::Vec<decltype(d)> x_lanes,
                                  hn::Vec<decltype(d)> dy_lanes) HWY_ATTR {
    hn::StoreU(hn::MulAdd(hn::Mul(x_lanes, r), dy_lanes,
                          hn::LoadU(d, partial + chunk + i)),
               d, partial + chunk + i);
  };
  if (!job.want_dx) {
    for (size_t i = 0; i < n; i += hn::Lanes(d)) {
      add_to_dweight(i, LoadUpTo(d, x + i, n - i), LoadUpTo(d, dy + i, n - i));
    }
    return;
  }
  // dx = r (w dy - x r^2 / dim sum(x w dy)).
  const auto along_x =
      hn::Set(d, static_cast<Computed<T>>(rms * rms * sums.xwg / dim));
  WriteRow(d, job.dx.Out<T>(row) + chunk, n, job.stream,
           [&](size_t i, size_t left) HWY_ATTR {
             PrefetchToL2(next_dy + i);
             const auto v = LoadUpTo(d, x + i, left);
             const auto g = LoadUpTo(d, dy + i, left);
             if (partial != nullptr) add_to_dweight(i, v, g);
             return hn::Mul(
                 r, hn::NegMulAdd(v, along_x,
                                  hn::Mul(LoadUpTo(d, weight + i, left), g)));
           });
}

// Rows in groups, columns in chunks: the chunk of the weight and of its
// gradient stays in L1 for all rows of the group, the rows in L2 between the
// passes.
template <typename T, typename W>
void BackwardRows(const RmsNormJob& job, RowRange rows,
                  Computed<T>* HWY_RESTRICT partial) {
  constexpr size_t kChunk = 1024;
  constexpr size_t kGroupBytes = 128 * 1024;
  constexpr int64_t kMostRows = 16;
  const int64_t group = std::clamp<int64_t>(
      static_cast<int64_t>(kGroupBytes / (2 * job.dim * sizeof(T))), 1,
      kMostRows);
  for (int64_t first = rows.begin; first < rows.end; first += group) {
    const int64_t count = std::min(group, rows.end - first);
    const auto next = [&job, count](int64_t row) {
      return std::min(row + count, job.rows - 1);
    };
    RowSums sums[kMostRows];
    for (size_t chunk = 0; chunk < job.dim; chunk += kChunk) {
      const size_t n = HWY_MIN(kChunk, job.dim - chunk);
      for (int64_t i = 0; i < count; ++i) {
        AddToSums<T, W>(job, first + i, next(first + i), chunk, n, &sums[i]);
      }
    }
    for (size_t chunk = 0; chunk < job.dim; chunk += kChunk) {
      const size_t n = HWY_MIN(kChunk, job.dim - chunk);
      for (int64_t i = 0; i < count; ++i) {
        BackwardChunk<T, W>(job, first + i, next(first + i), sums[i], chunk, n,
                            partial);
      }
    }
  }
  hwy::FlushStream();
}

// Rows of one piece; with dweight wanted, `piece` says where its sums go.
void RmsNormBackwardRows(const RmsNormJob& job, RowRange rows, int64_t piece) {
  WithElements(job.dtype, job.weight_dtype, [&](auto x, auto weight) {
    using A = Computed<decltype(x)>;
    A* partial = nullptr;
    if (job.partial != nullptr) {
      partial = reinterpret_cast<A*>(job.partial) +
                static_cast<size_t>(piece) * job.partial_stride;
      std::fill(partial, partial + job.partial_stride, A(0));
    }
    BackwardRows<decltype(x), decltype(weight)>(job, rows, partial);
  });
}

template <typename A, typename W>
void ReduceColumns(const RmsNormJob& job, size_t begin, size_t end) {
  const hn::ScalableTag<A> d;
  const A* const partial = reinterpret_cast<const A*>(job.partial);
  W* HWY_RESTRICT dweight = static_cast<W*>(job.dweight);
  for (size_t i = begin; i < end; i += hn::Lanes(d)) {
    auto sum = hn::Zero(d);
    for (int64_t piece = 0; piece < job.pieces; ++piece) {
      sum = hn::Add(
          sum, hn::LoadU(
                   d, partial +
                          static_cast<size_t>(piece) * job.partial_stride + i));
    }
    if (job.accumulate_dweight) {
      sum = hn::Add(sum, LoadUpTo(d, dweight + i, end - i));
    }
    StoreUpTo(d, sum, dweight + i, end - i);
  }
}

// Columns [columns.begin, columns.end), begin a multiple of 64.
void RmsNormReduce(const RmsNormJob& job, RowRange columns) {
  const auto begin = static_cast<size_t>(columns.begin);
  const auto end = static_cast<size_t>(columns.end);
  WithElements(job.dtype, job.dweight_dtype, [&](auto x, auto dweight) {
    ReduceColumns<Computed<decltype(x)>, decltype(dweight)>(job, begin, end);
  });
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/simd/target.h"

namespace fa2 {
namespace ops {
namespace {

HWY_EXPORT(RmsNormRows);
HWY_EXPORT(RmsNormBackwardRows);
HWY_EXPORT(RmsNormReduce);

// Pieces of at least 32 rows keep the sums' own traffic below 2% of the rows';
// 256 of them are enough for any number of cores.
int64_t RowsPerPiece(int64_t rows) {
  constexpr int64_t kLeastRows = 32;
  constexpr int64_t kMostPieces = 256;
  return std::max(kLeastRows, CeilDiv(rows, kMostPieces));
}

// SVE's longest vector.
constexpr size_t kMostVectorBytes = 256;

// Columns of one item of the reduction; a multiple of every vector length.
constexpr int64_t kReduceColumns = 1024;

Status CheckWeight(const NamedView& weight, const NamedView& x) {
  Status status = CheckVector(weight, kFloats, x.view.sizes[3]);
  if (status.ok() && weight.view.dtype != DType::kF32) {
    status = CheckType(weight, x);
  }
  if (status.ok() && weight.view.sizes[3] > 1 && weight.view.strides[3] != 1) {
    status = Status::InvalidArgument(std::string(weight.name) + " has stride " +
                                     std::to_string(weight.view.strides[3]) +
                                     "; its elements must be contiguous");
  }
  return status;
}

Status CheckEps(double eps) {
  if (std::isfinite(eps) && eps >= 0.0) return Status::Ok();
  return Status::InvalidArgument("eps is " + std::to_string(eps) +
                                 "; it must be finite and 0 or more");
}

Status CheckBackward(const RmsNormBackwardArgs& args) {
  const NamedView x{"x", args.x};
  const NamedView dy{"dy", args.dy};
  const NamedView weight{"weight", args.weight};
  const NamedView dx{"dx", args.dx};
  const NamedView dweight{"dweight", args.dweight};
  FA2_RETURN_IF_ERROR(CheckRows(x, kFloats));
  FA2_RETURN_IF_ERROR(CheckRowsLike(dy, x));
  if (dx.view.given()) FA2_RETURN_IF_ERROR(CheckRowsLike(dx, x));
  FA2_RETURN_IF_ERROR(CheckWeight(weight, x));
  if (dweight.view.given()) FA2_RETURN_IF_ERROR(CheckWeight(dweight, x));
  FA2_RETURN_IF_ERROR(CheckEps(args.eps));
  return CheckOverlap({dx, dweight}, {dy, x, weight});
}

RmsNormJob MakeJob(const ConstTensorView& x, const ConstTensorView& weight,
                   double eps) {
  RmsNormJob job;
  job.x = RowArray(x);
  job.weight = weight.data;
  job.rows = RowCount(x);
  job.dim = static_cast<size_t>(x.sizes[3]);
  job.eps = eps;
  job.dtype = x.dtype;
  job.weight_dtype = weight.dtype;
  job.stream = WriteNonTemporal(Bytes(x));
  return job;
}

Status Forward(const ConstTensorView& x, const ConstTensorView& weight,
               double eps, const TensorView& y, const Context& context) {
  FA2_RETURN_IF_ERROR(CheckRows({"x", x}, kFloats));
  FA2_RETURN_IF_ERROR(CheckRowsLike({"y", y}, {"x", x}));
  FA2_RETURN_IF_ERROR(CheckWeight({"weight", weight}, {"x", x}));
  FA2_RETURN_IF_ERROR(CheckEps(eps));
  FA2_RETURN_IF_ERROR(CheckOverlap({{"y", y}}, {{"x", x}, {"weight", weight}}));
  if (Elements(x) == 0) return Status::Ok();

  RmsNormJob job = MakeJob(x, weight, eps);
  job.y = RowArray(y);
  const auto kernel =
      FA2_TARGET_FUNCTION(RmsNormRows, context.impl().targets());
  ForRows(context, job.rows, RowsPerItem(x.sizes[3], x.dtype),
          [kernel, &job](RowRange range, int64_t /*item*/, int /*worker*/) {
            kernel(job, range);
          });
  return Status::Ok();
}

Status Backward(const RmsNormBackwardArgs& args, Context& context) {
  FA2_RETURN_IF_ERROR(CheckBackward(args));
  const ConstTensorView& x = args.x;
  const ConstTensorView dx = args.dx;
  const ConstTensorView dweight = args.dweight;
  if (x.sizes[3] == 0) return Status::Ok();

  RmsNormJob job = MakeJob(x, args.weight, args.eps);
  job.dy = RowArray(args.dy);
  job.want_dx = dx.given();
  if (job.want_dx) job.dx = RowArray(dx);
  const int64_t step = dweight.given() ? RowsPerPiece(job.rows)
                                       : RowsPerItem(x.sizes[3], x.dtype);
  job.pieces = CeilDiv(job.rows, step);

  threading::Workspace workspace;
  if (dweight.given()) {
    job.dweight = args.dweight.data;
    job.dweight_dtype = dweight.dtype;
    job.accumulate_dweight = args.accumulate_dweight;
    // Room for a whole vector that begins at the last column.
    const size_t row_bytes =
        threading::AlignUp(job.dim * ComputedSize(x.dtype) + kMostVectorBytes);
    job.partial_stride = row_bytes / ComputedSize(x.dtype);
    // One piece more than there are keeps the pointer valid without rows.
    FA2_RETURN_IF_ERROR(context.impl().workspaces().Acquire(
        row_bytes * static_cast<size_t>(job.pieces + 1), &workspace));
    job.partial = workspace.data();
  }
  const int64_t targets = context.impl().targets();
  if (job.want_dx || dweight.given()) {
    const auto kernel = FA2_TARGET_FUNCTION(RmsNormBackwardRows, targets);
    ForRows(context, job.rows, step,
            [kernel, &job](RowRange range, int64_t piece, int /*worker*/) {
              kernel(job, range, piece);
            });
  }
  if (dweight.given()) {
    const auto reduce = FA2_TARGET_FUNCTION(RmsNormReduce, targets);
    ForRows(context, x.sizes[3], kReduceColumns,
            [reduce, &job](RowRange columns, int64_t /*item*/, int /*worker*/) {
              reduce(job, columns);
            });
  }
  return Status::Ok();
}

}  // namespace
}  // namespace ops

Status RmsNorm(const ConstTensorView& x, const ConstTensorView& weight,
               double eps, const TensorView& y, Context* given) {
  return ops::Call("rms_norm", x, given, [&](Context& context) {
    return ops::Forward(x, weight, eps, y, context);
  });
}

Status RmsNormBackward(const RmsNormBackwardArgs& args, Context* given) {
  return ops::Call("rms_norm_backward", args.x, given, [&](Context& context) {
    return ops::Backward(args, context);
  });
}

}  // namespace fa2
#endif  // HWY_ONCE
