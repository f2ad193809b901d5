// SPDX-License-Identifier: Apache-2.0

// Softmax cross entropy and its gradient. Every logit is read from memory once
// and its exponential taken once: the second pass over a row scales what the
// first left in L2 (512 KiB for 128k logits).
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "fa2/training_ops.h"
#include "src/ops/arguments.h"
#include "src/ops/call.h"
#include "src/ops/row_exp_scratch.h"
#include "src/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/cross_entropy.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "src/ops/load-inl.h"
#include "src/ops/row_exp-inl.h"

#ifndef FA2_SRC_OPS_CROSS_ENTROPY_ONCE_
#define FA2_SRC_OPS_CROSS_ENTROPY_ONCE_
namespace fa2::ops {

struct CrossEntropyJob {
  RowArray logits, dlogits;
  ConstTensorView targets, weights;
  int64_t ignore_index = 0;
  int64_t rows = 0;
  size_t vocab = 0;
  double one_over_count = 0.0;
  double label_smoothing = 0.0;
  double z_loss = 0.0;
  DType dtype = DType::kF32;
  bool want_dlogits = false;
  bool stream = false;           // by non-temporal stores
  std::byte* scratch = nullptr;  // ExpScratch(vocab) numbers a worker
  double* losses = nullptr;      // of every row, not divided by the count
  double* z_losses = nullptr;    // their part that z_loss weighs
};

inline double RealAt(const ConstTensorView& x, int64_t i) {
  const int64_t at = i * x.strides[3];
  return x.dtype == DType::kF64
             ? static_cast<const double*>(x.data)[at]
             : static_cast<double>(static_cast<const float*>(x.data)[at]);
}

}  // namespace fa2::ops
#endif  // FA2_SRC_OPS_CROSS_ENTROPY_ONCE_

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {

// The gradient at the target of a row that is written, from a p that is not
// rounded yet.
template <typename T>
struct TargetGradient {
  T* out = nullptr;
  Computed<T> value = 0;
};

template <typename T>
void CrossEntropyRowsOf(const CrossEntropyJob& job, RowRange rows,
                        Computed<T>* scratch) {
  const hn::ScalableTag<Computed<T>> d;
  const double smoothing = job.label_smoothing;
  const double one_over_vocab = 1.0 / static_cast<double>(job.vocab);
  ScaledRow<T> last;
  TargetGradient<T> at_last;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t target = IndexAt(job.targets, row);
    if (target == job.ignore_index) {
      job.losses[row] = job.z_losses[row] = 0.0;
      if (job.want_dlogits) {
        WriteRow(d, job.dlogits.Out<T>(row), job.vocab, job.stream,
                 [&](size_t, size_t) HWY_ATTR { return hn::Zero(d); });
      }
      continue;
    }
    const T* HWY_RESTRICT logits = job.logits.In<T>(row);
    // Before the row is overwritten, if dlogits are to take its place.
    const double at_target = static_cast<double>(Widen(logits[target]));
    const double mean =
        smoothing == 0.0
            ? 0.0
            : one_over_vocab *
                  SumRow(d, job.vocab, [&](size_t i, size_t left) HWY_ATTR {
                    return LoadUpTo(d, logits + i, left);
                  });
    const auto sum = SumExpOfRow(
        d, logits, job.vocab, job.logits.In<T>(std::min(row + 1, job.rows - 1)),
        scratch, last);
    if (last.out != nullptr) Narrow(at_last.value, at_last.out);
    const double weight = job.weights.given() ? RealAt(job.weights, row) : 1.0;
    // Differences to the maximum: logits of 1e4 would take the digits of the
    // logarithm otherwise.
    const double log_sum = std::log(sum.sum);
    const double lse = log_sum + sum.max;
    const double z_loss = job.z_loss == 0.0 ? 0.0 : job.z_loss * lse * lse;
    double loss = log_sum - (at_target - sum.max);
    if (smoothing != 0.0) {
      loss += smoothing * (at_target - mean);
    }
    job.losses[row] = weight * (loss + z_loss);
    job.z_losses[row] = weight * z_loss;
    if (!job.want_dlogits) continue;
    const double scale = weight * job.one_over_count;
    // dlogits = scale (p (1 + 2 z_loss lse) - (1 - smoothing) one_hot
    //                  - smoothing / vocab).
    const double of_p =
        scale * (job.z_loss == 0.0 ? 1.0 : 1.0 + 2.0 * job.z_loss * lse);
    const double everywhere = -scale * smoothing * one_over_vocab;
    last = {job.dlogits.Out<T>(row), sum.max, of_p / sum.sum,
            static_cast<Computed<T>>(everywhere), job.stream};
    const double p = std::exp(at_target - sum.max) / sum.sum;
    at_last = {last.out + target,
               static_cast<Computed<T>>(of_p * p - scale * (1.0 - smoothing) +
                                        everywhere)};
  }
  WriteScaledRow(d, scratch, job.vocab, last);
  if (last.out != nullptr) Narrow(at_last.value, at_last.out);
  hwy::FlushStream();
}

void CrossEntropyRows(const CrossEntropyJob& job, RowRange rows, int worker) {
  WithElement(job.dtype, [&](auto element) {
    using T = decltype(element);
    CrossEntropyRowsOf<T>(
        job, rows,
        reinterpret_cast<Computed<T>*>(job.scratch) +
            static_cast<size_t>(worker) * ExpScratch(job.vocab));
  });
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/simd/target.h"

namespace fa2 {
namespace ops {
namespace {

HWY_EXPORT(CrossEntropyRows);

void WriteReal(const TensorView& out, int64_t i, bool accumulate,
               double value) {
  const int64_t at = i * out.strides[3];
  if (out.dtype == DType::kF64) {
    double& to = static_cast<double*>(out.data)[at];
    to = (accumulate ? to : 0.0) + value;
  } else {
    float& to = static_cast<float*>(out.data)[at];
    to = static_cast<float>((accumulate ? to : 0.0) + value);
  }
}

double Sum(const double* x, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

bool SameView(const ConstTensorView& a, const ConstTensorView& b) {
  return a.data == b.data && a.sizes == b.sizes && a.strides == b.strides;
}

// The vectors of real numbers beside the logits.
Status CheckReals(const CrossEntropyArgs& args) {
  const int64_t positions = RowCount(args.logits);
  const struct {
    const char* name;
    ConstTensorView view;
    int64_t size;
  } reals[] = {{"loss", args.loss, 1},
               {"z_loss_part", args.z_loss_part, 1},
               {"losses", args.losses, positions},
               {"weights", args.weights, positions}};
  for (const auto& real : reals) {
    if (!real.view.given()) continue;
    const Status status = CheckVector({real.name, real.view},
                                      {DType::kF32, DType::kF64}, real.size);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status CheckCoefficients(const CrossEntropyArgs& args) {
  if (!(args.label_smoothing >= 0.0 && args.label_smoothing <= 1.0)) {
    return Status::InvalidArgument("label_smoothing is " +
                                   std::to_string(args.label_smoothing) +
                                   "; it must be in [0, 1]");
  }
  if (!(std::isfinite(args.z_loss) && args.z_loss >= 0.0)) {
    return Status::InvalidArgument("z_loss is " + std::to_string(args.z_loss) +
                                   "; it must be finite and 0 or more");
  }
  return Status::Ok();
}

Status CheckCrossEntropy(const CrossEntropyArgs& args, int64_t* counted) {
  const NamedView logits{"logits", args.logits};
  const NamedView targets{"targets", args.targets};
  const NamedView dlogits{"dlogits", args.dlogits};
  FA2_RETURN_IF_ERROR(CheckRows(logits, kFloats));
  FA2_RETURN_IF_ERROR(
      CheckVector(targets, {DType::kI32, DType::kI64}, RowCount(args.logits)));
  FA2_RETURN_IF_ERROR(CheckReals(args));
  FA2_RETURN_IF_ERROR(CheckCoefficients(args));
  if (dlogits.view.given()) FA2_RETURN_IF_ERROR(CheckRowsLike(dlogits, logits));
  if (args.count.has_value() && *args.count < 0) {
    return Status::InvalidArgument("count is " + std::to_string(*args.count) +
                                   "; it must be 0 or more");
  }
  // In place: every row is read before it is written.
  const NamedView read = {"logits", SameView(args.logits, dlogits.view)
                                        ? ConstTensorView{}
                                        : args.logits};
  FA2_RETURN_IF_ERROR(CheckOverlap({{"loss", args.loss},
                                    {"z_loss_part", args.z_loss_part},
                                    {"losses", args.losses},
                                    dlogits},
                                   {read, targets, {"weights", args.weights}}));
  return CheckIndices(targets, args.logits.sizes[3], "the vocabulary",
                      args.ignore_index, counted);
}

Status Run(const CrossEntropyArgs& args, Context& context) {
  int64_t counted = 0;
  FA2_RETURN_IF_ERROR(CheckCrossEntropy(args, &counted));
  if (args.count == 0) return Status::Ok();

  const int64_t rows = RowCount(args.logits);
  const int64_t vocab = args.logits.sizes[3];
  const int threads = context.impl().pool().num_threads();
  CrossEntropyJob job;
  job.logits = RowArray(args.logits);
  job.targets = args.targets;
  job.weights = args.weights;
  job.ignore_index = args.ignore_index;
  job.rows = rows;
  job.vocab = static_cast<size_t>(vocab);
  // Without a counted position every term is 0, whatever this is.
  job.one_over_count =
      1.0 /
      static_cast<double>(args.count.value_or(std::max<int64_t>(1, counted)));
  job.label_smoothing = args.label_smoothing;
  job.z_loss = args.z_loss;
  job.dtype = args.logits.dtype;
  job.want_dlogits = args.dlogits.given();
  if (job.want_dlogits) job.dlogits = RowArray(args.dlogits);
  job.stream = WriteNonTemporal(Bytes(args.logits));

  threading::Workspace workspace;
  const size_t loss_bytes = threading::AlignUp(
      sizeof(double) * static_cast<size_t>(std::max<int64_t>(1, rows)));
  FA2_RETURN_IF_ERROR(context.impl().workspaces().Acquire(
      2 * loss_bytes + ExpScratch(job.vocab) * ComputedSize(job.dtype) *
                           static_cast<size_t>(threads),
      &workspace));
  job.losses = reinterpret_cast<double*>(workspace.data());
  job.z_losses = reinterpret_cast<double*>(workspace.data() + loss_bytes);
  job.scratch = workspace.data() + 2 * loss_bytes;

  const auto kernel =
      FA2_TARGET_FUNCTION(CrossEntropyRows, context.impl().targets());
  ForRows(context, rows,
          PipelinedRowsPerItem(rows, vocab, args.logits.dtype, threads),
          [kernel, &job](RowRange range, int64_t /*item*/, int worker) {
            kernel(job, range, worker);
          });
  if (args.loss.given()) {
    WriteReal(args.loss, 0, args.accumulate_loss,
              Sum(job.losses, rows) * job.one_over_count);
  }
  if (args.z_loss_part.given()) {
    WriteReal(args.z_loss_part, 0, args.accumulate_loss,
              Sum(job.z_losses, rows) * job.one_over_count);
  }
  if (args.losses.given()) {
    for (int64_t row = 0; row < rows; ++row) {
      WriteReal(args.losses, row, /*accumulate=*/false, job.losses[row]);
    }
  }
  return Status::Ok();
}

}  // namespace
}  // namespace ops

Status CrossEntropy(const CrossEntropyArgs& args, Context* given) {
  return ops::Call("cross_entropy", args.logits, given,
                   [&](Context& context) { return ops::Run(args, context); });
}

}  // namespace fa2
#endif  // HWY_ONCE
