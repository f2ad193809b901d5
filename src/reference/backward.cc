// SPDX-License-Identifier: Apache-2.0

// The gradients of attention, row by row, in double.
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "fa2/reference.h"
#include "src/checks/guard.h"
#include "src/platform/float_environment.h"
#include "src/reference/check.h"
#include "src/reference/scores.h"
#include "src/reference/sequences.h"
#include "src/reference/tensor_access.h"

namespace fa2 {
namespace {

// Sums of a gradient that is shared by several heads or rows, in the shape of
// its output. Sizes of 1 are summed over.
class SharedGradient {
 public:
  explicit SharedGradient(const TensorView& output) : output_(output) {
    dense_ =
        Dense(static_cast<const void*>(nullptr), DType::kF64, output.sizes[0],
              output.sizes[1], output.sizes[2], output.sizes[3]);
    if (output.given()) {
      sums_.resize(static_cast<size_t>(output.sizes[0] * output.sizes[1] *
                                       output.sizes[2] * output.sizes[3]));
    }
  }

  void Add(int64_t b, int64_t h, int64_t i, int64_t j, double gradient) {
    if (!output_.given()) return;
    sums_[static_cast<size_t>(reference::OffsetOf(dense_, b, h, i, j))] +=
        gradient;
  }

  void Store(bool accumulate) const {
    const auto& n = output_.sizes;
    if (!output_.given()) return;
    for (int64_t b = 0; b < n[0]; ++b) {
      for (int64_t h = 0; h < n[1]; ++h) {
        for (int64_t i = 0; i < n[2]; ++i) {
          for (int64_t j = 0; j < n[3]; ++j) {
            double sum = sums_[static_cast<size_t>(
                reference::OffsetOf(dense_, b, h, i, j))];
            if (accumulate) sum += reference::Load(output_, b, h, i, j);
            reference::Store(output_, b, h, i, j, sum);
          }
        }
      }
    }
  }

 private:
  TensorView output_;
  ConstTensorView dense_;
  std::vector<double> sums_;
};

// y += a * x
void AddScaled(double a, const double* x, int64_t n, double* y) {
  for (int64_t d = 0; d < n; ++d) y[d] += a * x[d];
}

// Rows of a gradient, kept until all are there, so that a call whose memory
// ends has written nothing.
struct KeptRows {
  reference::Matrix rows;
  int64_t batch, head, begin, count;
};

void StoreAll(const std::vector<KeptRows>& kept, bool accumulate,
              const TensorView& output) {
  for (const KeptRows& k : kept) {
    reference::StoreRows(k.rows, accumulate, output, k.batch, k.head, k.begin,
                         k.count);
  }
}

Status Backward(const AttentionBackwardArgs& args) {
  namespace ref = reference;
  const AttentionOptions& options = args.options;
  if (Status status = ref::CheckBackward(args); !status.ok()) return status;

  const ref::Sequences sequences = ref::SequencesOf(args.q, args.k, options);
  const int64_t heads = args.q.sizes[1];
  const int64_t kv_heads = args.k.sizes[1];
  const int64_t group = kv_heads > 0 ? heads / kv_heads : 0;
  const int64_t head_dim = args.q.sizes[3];
  const int64_t value_dim = args.v.sizes[3];
  const double scale = ref::ScaleOf(options, head_dim);
  SharedGradient dbias(args.dbias);
  SharedGradient dalibi(args.dalibi_slopes);
  SharedGradient dsinks(args.dsinks);
  std::vector<KeptRows> all_dq, all_dk, all_dv;

  for (const ref::Sequence& seq : sequences.list) {
    for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      const ref::Matrix k =
          ref::LoadRows(args.k, seq.batch, kv_head, seq.k_begin, seq.nk);
      const ref::Matrix v =
          ref::LoadRows(args.v, seq.batch, kv_head, seq.k_begin, seq.nk);
      ref::Matrix dk(seq.nk, head_dim);
      ref::Matrix dv(seq.nk, value_dim);

      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const ref::Matrix q =
            ref::LoadRows(args.q, seq.batch, h, seq.q_begin, seq.nq);
        const ref::Matrix dout =
            ref::LoadRows(args.dout, seq.batch, h, seq.q_begin, seq.nq);
        ref::Matrix dq(seq.nq, head_dim);
        const double sink = options.sinks.given()
                                ? ref::Load(options.sinks, 0, h, 0, 0)
                                : -std::numeric_limits<double>::infinity();

        for (int64_t i = 0; i < seq.nq; ++i) {
          const std::vector<ref::Score> scores = ref::ScoreRow(
              options, scale, {sequences, seq, h, heads, i}, q.row(i), k);
          const auto statistic = [&](const ConstTensorView& view) {
            return ref::LoadStatistic(view, sequences, seq, h, i);
          };
          const double dlse = args.dlse.given() ? statistic(args.dlse) : 0.0;
          if (scores.empty()) {
            // O is 0 and lse is the sink alone, whatever the caller's lse says.
            if (std::isfinite(sink)) dsinks.Add(0, h, 0, 0, dlse);
            continue;
          }
          const double lse = statistic(args.lse);

          // delta_i = sum_d O_id dO_id - dlse_i
          double delta = 0.0;
          if (args.delta.given()) {
            delta = statistic(args.delta);
          } else {
            const ref::Matrix out =
                ref::LoadRows(args.out, seq.batch, h, seq.q_begin + i, 1);
            delta = ref::DotProduct(out.row(0), dout.row(i), value_dim);
          }
          delta -= dlse;

          for (const ref::Score& s : scores) {
            const int64_t j = s.key;
            const double p = std::exp(s.value - lse);
            double dp = 0.0;
            if (s.keep != 0.0) {
              // dV_j += P_ij Z_ij dO_i;  dP_ij = (dO_i . V_j) Z_ij
              AddScaled(p * s.keep, dout.row(i), value_dim, dv.row(j));
              dp = ref::DotProduct(dout.row(i), v.row(j), value_dim) * s.keep;
            }
            double ds = p * (dp - delta);
            dbias.Add(seq.index, h, i, j, ds);
            dalibi.Add(seq.index, h, 0, 0, -ds * s.distance);
            ds *= s.cap_slope;
            AddScaled(scale * ds, k.row(j), head_dim, dq.row(i));
            AddScaled(scale * ds, q.row(i), head_dim, dk.row(j));
          }
          dsinks.Add(0, h, 0, 0, -std::exp(sink - lse) * delta);
        }
        if (args.dq.given()) {
          all_dq.push_back({std::move(dq), seq.batch, h, seq.q_begin, seq.nq});
        }
      }
      if (args.dk.given()) {
        all_dk.push_back(
            {std::move(dk), seq.batch, kv_head, seq.k_begin, seq.nk});
      }
      if (args.dv.given()) {
        all_dv.push_back(
            {std::move(dv), seq.batch, kv_head, seq.k_begin, seq.nk});
      }
    }
  }
  StoreAll(all_dq, args.accumulate_dq, args.dq);
  StoreAll(all_dk, args.accumulate_dk, args.dk);
  StoreAll(all_dv, args.accumulate_dv, args.dv);
  dbias.Store(args.accumulate_dbias);
  dalibi.Store(false);
  dsinks.Store(false);
  return Status::Ok();
}

}  // namespace

Status AttentionReferenceBackward(const AttentionBackwardArgs& args) {
  return checks::Guarded([&] {
    const platform::DefaultFloatEnvironment floats;
    return Backward(args);
  });
}

}  // namespace fa2
