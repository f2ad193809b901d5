// Softmax cross entropy and its gradient. Every logit is read from memory once
// and its exponential taken once: the second pass over a row scales what the
// first left in L2 (512 KiB for 128k logits).
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "fa2/training_ops.h"
#include "src/context/context_impl.h"
#include "src/ops/arguments.h"
#include "src/ops/exp_scratch.h"
#include "src/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/cross_entropy.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "src/ops/exp-inl.h"
#include "src/ops/load-inl.h"

#ifndef FA2_SRC_OPS_CROSS_ENTROPY_ONCE_
#define FA2_SRC_OPS_CROSS_ENTROPY_ONCE_
namespace fa2::ops {

struct CrossEntropyJob {
  RowArray logits, dlogits;
  ConstTensorView targets;
  int64_t ignore_index = 0;
  int64_t rows = 0;
  size_t vocab = 0;
  double one_over_count = 0.0;
  bool bf16 = false;
  bool want_dlogits = false;
  bool stream = false;       // write past the caches
  float* scratch = nullptr;  // ExpScratch(vocab) floats a worker
  double* losses = nullptr;  // of every row, not divided by the count
};

}  // namespace fa2::ops
#endif  // FA2_SRC_OPS_CROSS_ENTROPY_ONCE_

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {

// p - 1 at the target of a row that is written, from a p that is not rounded
// yet.
template <typename T>
struct TargetGradient {
  T* out = nullptr;
  float value = 0.0f;
};

template <typename T>
void CrossEntropyRowsOf(const CrossEntropyJob& job, RowRange rows,
                        float* scratch) {
  const hn::ScalableTag<float> d;
  ScaledRow<T> last;
  TargetGradient<T> at_last;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t target = IndexAt(job.targets, row);
    if (target == job.ignore_index) {
      job.losses[row] = 0.0;
      if (job.want_dlogits) {
        WriteRow(d, job.dlogits.Out<T>(row), job.vocab, job.stream,
                 [&](size_t, size_t) HWY_ATTR { return hn::Zero(d); });
      }
      continue;
    }
    const T* HWY_RESTRICT logits = job.logits.In<T>(row);
    const RowExpSum sum = SumExpOfRow(
        d, logits, job.vocab, job.logits.In<T>(std::min(row + 1, job.rows - 1)),
        scratch, last);
    if (last.out != nullptr) FromFloat(at_last.value, at_last.out);
    const double at_target =
        static_cast<double>(ToFloat(logits[target])) - sum.max;
    job.losses[row] = std::log(sum.sum) - at_target;
    if (!job.want_dlogits) continue;
    last = {job.dlogits.Out<T>(row), sum.max, job.one_over_count / sum.sum,
            job.stream};
    const double p = std::exp(at_target) / sum.sum;
    at_last = {last.out + target,
               static_cast<float>((p - 1.0) * job.one_over_count)};
  }
  WriteScaledRow(d, scratch, job.vocab, last);
  if (last.out != nullptr) FromFloat(at_last.value, at_last.out);
  hwy::FlushStream();
}

void CrossEntropyRows(const CrossEntropyJob& job, RowRange rows, int worker) {
  float* const scratch =
      job.scratch + static_cast<size_t>(worker) * ExpScratch(job.vocab);
  job.bf16 ? CrossEntropyRowsOf<Bf16>(job, rows, scratch)
           : CrossEntropyRowsOf<float>(job, rows, scratch);
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/simd/target.h"

namespace fa2 {
namespace ops {
namespace {

HWY_EXPORT(CrossEntropyRows);

void WriteLoss(const TensorView& loss, bool accumulate, double value) {
  if (loss.dtype == DType::kF64) {
    auto* const to = static_cast<double*>(loss.data);
    *to = (accumulate ? *to : 0.0) + value;
  } else {
    auto* const to = static_cast<float*>(loss.data);
    *to = static_cast<float>((accumulate ? *to : 0.0) + value);
  }
}

Status CheckCrossEntropy(const CrossEntropyArgs& args, int64_t* counted) {
  const ConstTensorView& logits = args.logits;
  const ConstTensorView loss = args.loss;
  const ConstTensorView dlogits = args.dlogits;
  Status status = CheckRows({"logits", logits}, {DType::kF32, DType::kBF16});
  if (status.ok()) {
    status = CheckVector({"targets", args.targets}, {DType::kI32, DType::kI64},
                         RowCount(logits));
  }
  if (status.ok() && loss.given()) {
    status = CheckVector({"loss", loss}, {DType::kF32, DType::kF64}, 1);
  }
  if (status.ok() && dlogits.given()) {
    status = CheckRows({"dlogits", dlogits}, {DType::kF32, DType::kBF16});
    if (status.ok())
      status = CheckType({"dlogits", dlogits}, {"logits", logits});
    if (status.ok()) {
      status =
          CheckShape({"dlogits", dlogits}, logits.sizes, "the shape of logits");
    }
  }
  if (status.ok() && args.count.has_value() && *args.count < 0) {
    status = Status::InvalidArgument("count is " + std::to_string(*args.count) +
                                     "; it must be 0 or more");
  }
  if (status.ok()) {
    status = CheckOverlap({{"loss", loss}, {"dlogits", dlogits}},
                          {{"logits", logits}, {"targets", args.targets}});
  }
  if (status.ok()) {
    status = CheckIndices({"targets", args.targets}, logits.sizes[3],
                          "the vocabulary", args.ignore_index, counted);
  }
  return status;
}

}  // namespace
}  // namespace ops

Status CrossEntropy(const CrossEntropyArgs& args, Context* context) {
  using namespace ops;
  int64_t counted = 0;
  Status status = ResolveContext(context, &context);
  if (status.ok()) status = CheckCrossEntropy(args, &counted);
  if (!status.ok() || args.count == 0) return status;

  const int64_t rows = RowCount(args.logits);
  const int64_t vocab = args.logits.sizes[3];
  CrossEntropyJob job;
  job.logits = RowArray(args.logits);
  job.targets = args.targets;
  job.ignore_index = args.ignore_index;
  job.rows = rows;
  job.vocab = static_cast<size_t>(vocab);
  // Without a counted position every term is 0, whatever this is.
  job.one_over_count =
      1.0 /
      static_cast<double>(args.count.value_or(std::max<int64_t>(1, counted)));
  job.bf16 = args.logits.dtype == DType::kBF16;
  job.want_dlogits = args.dlogits.given();
  if (job.want_dlogits) job.dlogits = RowArray(args.dlogits);
  job.stream = WritePastCaches(Elements(args.logits) *
                               static_cast<int64_t>(SizeOf(args.logits.dtype)));

  threading::Workspace workspace;
  const size_t loss_bytes = threading::AlignUp(
      sizeof(double) * static_cast<size_t>(std::max<int64_t>(1, rows)));
  status = context->impl().workspaces().Acquire(
      loss_bytes +
          ExpScratch(job.vocab) * sizeof(float) *
              static_cast<size_t>(context->impl().pool().num_threads()),
      &workspace);
  if (!status.ok()) return status;
  job.losses = reinterpret_cast<double*>(workspace.data());
  job.scratch = reinterpret_cast<float*>(workspace.data() + loss_bytes);

  const int64_t step = PipelinedRowsPerItem(
      rows, vocab, args.logits.dtype, context->impl().pool().num_threads());
  const auto kernel =
      FA2_TARGET_FUNCTION(CrossEntropyRows, context->impl().targets());
  context->impl().pool().For(
      CeilDiv(rows, step),
      [kernel, &job, step, rows](int64_t item, int worker) {
        kernel(job, ItemRows(item, step, rows), worker);
      });
  if (args.loss.given()) {
    double sum = 0.0;
    for (int64_t row = 0; row < rows; ++row) sum += job.losses[row];
    WriteLoss(args.loss, args.accumulate_loss, sum * job.one_over_count);
  }
  return status;
}

}  // namespace fa2
#endif  // HWY_ONCE
