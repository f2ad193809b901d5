// SPDX-License-Identifier: Apache-2.0

// The public functions beside attention itself: delta and the dropout mask.
#include <algorithm>
#include <array>
#include <string>

#include "fa2/attention.h"
#include "src/attention/call/problem.h"
#include "src/attention/tensors/row_buffers.h"
#include "src/checks/views.h"
#include "src/common/integers.h"
#include "src/context/context_impl.h"
#include "src/simd/rowwise/rows.h"
#include "src/simd/rowwise/staging.h"

namespace fa2 {
namespace attention {
namespace {

using checks::CheckDType;
using checks::CheckOverlap;
using checks::CheckShape;
using checks::CheckStatisticsShape;
using checks::CheckView;
using checks::NamedView;
using checks::ShapeText;

Status CheckDelta(const ConstTensorView& out, const ConstTensorView& dout,
                  const TensorView& delta) {
  for (const NamedView& tensor :
       {NamedView{"out", out}, NamedView{"dout", dout},
        NamedView{"delta", delta}}) {
    FA2_RETURN_IF_ERROR(CheckView(tensor));
  }
  FA2_RETURN_IF_ERROR(CheckDType(
      {"out", out}, {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}, ""));
  FA2_RETURN_IF_ERROR(CheckDType({"dout", dout}, {out.dtype}, "as out has"));
  const DType wide = out.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  FA2_RETURN_IF_ERROR(
      CheckDType({"delta", delta}, {wide}, "for inputs of this dtype"));
  FA2_RETURN_IF_ERROR(
      CheckShape({"dout", dout}, out.sizes, "the shape of out"));
  FA2_RETURN_IF_ERROR(CheckStatisticsShape(
      {"delta", delta}, {out.sizes[0], out.sizes[1], out.sizes[2]},
      "[B, H, N] of out"));
  return CheckOverlap({{"delta", delta}}, {{"out", out}, {"dout", dout}});
}

// Rows of delta that one item computes: 256 rows of 128 bf16 twice are 128 KiB.
constexpr int64_t kDeltaRows = 256;

Status Delta(const ConstTensorView& out, const ConstTensorView& dout,
             const TensorView& delta, Context::Impl& impl) {
  FA2_RETURN_IF_ERROR(CheckDelta(out, dout, delta));
  const simd::RowKernels* kernels =
      simd::RowKernelsFor(delta.dtype, impl.targets());
  // Each worker has room for the rows of both tensors, should they not be
  // contiguous, and for sums on their way to delta's stride.
  const size_t rows_bytes = threading::AlignUp(
      kDeltaRows * static_cast<size_t>(out.sizes[3]) * SizeOf(out.dtype));
  const size_t worker_bytes =
      2 * rows_bytes + threading::AlignUp(kDeltaRows * sizeof(double));
  threading::Workspace workspace;
  FA2_RETURN_IF_ERROR(impl.workspaces().Acquire(
      worker_bytes * static_cast<size_t>(impl.pool().num_threads()),
      &workspace));
  const int64_t n = out.sizes[2];
  const int64_t chunks = CeilDiv(n, kDeltaRows);
  const int64_t heads = out.sizes[0] * out.sizes[1];
  impl.pool().For(chunks * heads, [&](int64_t item, int worker) {
    std::byte* mine = workspace.data() + worker * worker_bytes;
    void* sums = mine + 2 * rows_bytes;
    const int64_t b = item / chunks / out.sizes[1];
    const int64_t h = item / chunks % out.sizes[1];
    const int64_t first = item % chunks * kDeltaRows;
    const int64_t count = std::min(kDeltaRows, n - first);
    kernels->dot(ContiguousRows(out, {b, h, first, count}, mine),
                 ContiguousRows(dout, {b, h, first, count}, mine + rows_bytes),
                 sums);
    kernels->store(sums, 1, count, 1, 1.0, nullptr, false,
                   {At(delta, b, h, first), delta.dtype, delta.strides[2]});
  });
  return Status::Ok();
}

Status CheckKeepMask(double dropout_p, const TensorView& keep) {
  if (!(dropout_p >= 0.0 && dropout_p <= 1.0)) {
    return Status::InvalidArgument("dropout_p is " + std::to_string(dropout_p) +
                                   "; it must lie in [0, 1]");
  }
  FA2_RETURN_IF_ERROR(CheckView({"keep", keep}));
  FA2_RETURN_IF_ERROR(CheckDType({"keep", keep}, {DType::kBool}, ""));
  const std::array<int64_t, 4> dense = DenseStrides(keep.sizes);
  for (int i = 0; i < 4; ++i) {
    if (keep.sizes[i] > 1 && keep.strides[i] != dense[i]) {
      return Status::InvalidArgument("keep has strides " +
                                     ShapeText(keep.strides) +
                                     "; it must be dense, " + ShapeText(dense));
    }
  }
  return Status::Ok();
}

Status KeepMask(double dropout_p, uint64_t seed, uint64_t offset,
                const TensorView& keep, const Context::Impl& impl) {
  FA2_RETURN_IF_ERROR(CheckKeepMask(dropout_p, keep));
  const simd::StagingKernels* kernels =
      simd::StagingKernelsFor(DType::kF32, impl.targets());
  // 64 Ki elements an item: some 50 us each.
  constexpr int64_t kChunk = int64_t{1} << 16;
  const int64_t total =
      keep.sizes[0] * keep.sizes[1] * keep.sizes[2] * keep.sizes[3];
  impl.pool().For(CeilDiv(total, kChunk), [&](int64_t item, int /*worker*/) {
    const int64_t first = item * kChunk;
    kernels->keep_mask(dropout_p, seed, offset + static_cast<uint64_t>(first),
                       std::min(kChunk, total - first),
                       static_cast<uint8_t*>(keep.data) + first);
  });
  return Status::Ok();
}

}  // namespace
}  // namespace attention

Status AttentionDelta(const ConstTensorView& out, const ConstTensorView& dout,
                      const TensorView& delta, Context* given) {
  return WithContext(given, [&](Context* context) {
    return attention::Delta(out, dout, delta, context->impl());
  });
}

Status PhiloxKeepMask(double dropout_p, uint64_t seed, uint64_t offset,
                      const TensorView& keep, Context* given) {
  return WithContext(given, [&](Context* context) {
    return attention::KeepMask(dropout_p, seed, offset, keep, context->impl());
  });
}

}  // namespace fa2
