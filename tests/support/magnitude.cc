// SPDX-License-Identifier: Apache-2.0
#include "tests/support/magnitude.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "src/reference/scores.h"
#include "src/reference/sequences.h"
#include "src/reference/tensor_access.h"

namespace fa2::test {
namespace {

namespace ref = reference;

// Sums of squares per row; Root() turns them into magnitudes of an element of
// a row of `columns`.
class RowSquares {
 public:
  explicit RowSquares(const Sizes& sizes) : columns_(sizes[3]) {
    tensor_ = MakeTensor(DType::kF64, {sizes[0], sizes[1], sizes[2], 1});
    Fill(tensor_.view, 0.0);
  }
  // Sizes of 1 are summed over.
  void Add(int64_t b, int64_t h, int64_t i, double square) {
    const int64_t offset = ref::OffsetOf(tensor_.view, b, h, i, 0);
    static_cast<double*>(tensor_.view.data)[offset] += square;
  }
  Tensor Root() {
    const auto columns = static_cast<double>(std::max<int64_t>(columns_, 1));
    ForEachIndex(tensor_.view.sizes, [&](const Sizes& at) {
      Set(tensor_.view, at, std::sqrt(Get(tensor_.view, at) / columns));
    });
    return tensor_;
  }

 private:
  int64_t columns_;
  Tensor tensor_;
};

// Of the finite elements: what a NaN reaches is compared as such.
std::vector<double> SquaredLengths(const ref::Matrix& matrix, int64_t rows) {
  std::vector<double> squares;
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0.0;
    for (int64_t d = 0; d < matrix.columns; ++d) {
      const double x = matrix.row(i)[d];
      if (std::isfinite(x)) sum += x * x;
    }
    squares.push_back(sum);
  }
  return squares;
}

double MaxAbs(const ConstTensorView& view) {
  double max = 0.0;
  if (!view.given() || view.dtype == DType::kBool) return max;
  ForEachIndex(view.sizes, [&](const Sizes& at) {
    const double value = std::abs(Get(view, at));
    if (std::isfinite(value)) max = std::max(max, value);
  });
  return max;
}

Sizes SizesOr(const Tensor& tensor) {
  return tensor.given() ? tensor.view.sizes : Sizes{1, 1, 1, 1};
}

}  // namespace

void ComputeMagnitudes(const AttentionCase& c, const AttentionInputs& inputs,
                       double score_error, ExpectedOutputs* expected) {
  const AttentionOptions& options = inputs.options;
  const ref::Sequences sequences =
      ref::SequencesOf(inputs.q.view, inputs.k.view, options);
  const double scale = ref::ScaleOf(options, c.head_dim);
  const double value_columns =
      static_cast<double>(std::max<int64_t>(c.value_dim, 1));
  const double bias_max = MaxAbs(options.bias);
  const double slope_max = MaxAbs(options.alibi_slopes);
  RowSquares out(inputs.dout.view.sizes);
  RowSquares dq(inputs.q.view.sizes);
  RowSquares dk(inputs.k.view.sizes);
  RowSquares dv(inputs.v.view.sizes);
  RowSquares dbias(SizesOr(inputs.bias));
  RowSquares dalibi(SizesOr(inputs.alibi_slopes));
  RowSquares dsinks(SizesOr(inputs.sinks));
  double amplified = 0.0;
  double weight = 0.0;

  for (const ref::Sequence& seq : sequences.list) {
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t kv_head = h / (c.heads / c.kv_heads);
      const auto load = [&](const Tensor& t, int64_t head, bool keys) {
        return ref::LoadRows(t.view, seq.batch, head,
                             keys ? seq.k_begin : seq.q_begin,
                             keys ? seq.nk : seq.nq);
      };
      const ref::Matrix q = load(inputs.q, h, false);
      const ref::Matrix k = load(inputs.k, kv_head, true);
      const auto q2 = SquaredLengths(q, seq.nq);
      const auto k2 = SquaredLengths(k, seq.nk);
      const auto v2 = SquaredLengths(load(inputs.v, kv_head, true), seq.nk);
      const auto dout2 = SquaredLengths(load(inputs.dout, h, false), seq.nq);
      const std::vector<double> out2 =
          inputs.out.given()
              ? SquaredLengths(load(inputs.out, h, false), seq.nq)
              : SquaredLengths(load(expected->out.value, h, false), seq.nq);
      for (int64_t i = 0; i < seq.nq; ++i) {
        const int64_t row = seq.q_begin + i;
        const double lse =
            ref::LoadStatistic(inputs.lse.view, sequences, seq, h, i);
        const double dlse =
            inputs.dlse.given()
                ? ref::LoadStatistic(inputs.dlse.view, sequences, seq, h, i)
                : 0.0;
        const double delta2 = out2[i] * dout2[i] / value_columns + dlse * dlse;
        for (const ref::Score& s :
             ref::ScoreRow(options, scale, {sequences, seq, h, c.heads, i},
                           q.row(i), k)) {
          const int64_t j = s.key;
          const double p = std::exp(s.value - lse);
          const double a =
              1.0 + score_error *
                        (std::abs(s.value) + std::abs(lse) + options.softcap +
                         bias_max + slope_max * s.distance);
          if (std::isfinite(p * a)) {
            amplified += p * a;
            weight += p;
          }
          const double pa = p * a;
          const double pz2 = pa * pa * s.keep * s.keep;
          const double dp2 = dout2[i] * v2[j] / value_columns * s.keep * s.keep;
          const double ds2 = pa * pa * (dp2 + delta2);
          const double scaled = ds2 * scale * scale;
          out.Add(seq.batch, h, row, pz2 * v2[j]);
          dv.Add(seq.batch, kv_head, seq.k_begin + j, pz2 * dout2[i]);
          dq.Add(seq.batch, h, row, scaled * k2[j]);
          dk.Add(seq.batch, kv_head, seq.k_begin + j, scaled * q2[i]);
          dbias.Add(seq.index, h, i, ds2);
          dalibi.Add(seq.index, h, 0, ds2 * s.distance * s.distance);
        }
        if (options.sinks.given()) {
          const double sink = ref::Load(options.sinks, 0, h, 0, 0);
          const double p = std::isfinite(lse) ? std::exp(sink - lse) : 0.0;
          const double a = 1.0 + score_error * (std::abs(sink) + std::abs(lse));
          dsinks.Add(0, h, 0, p * p * a * a * delta2);
        }
      }
    }
  }
  expected->out.magnitude = out.Root();
  expected->dq.magnitude = dq.Root();
  expected->dk.magnitude = dk.Root();
  expected->dv.magnitude = dv.Root();
  expected->dbias.magnitude = dbias.Root();
  expected->dalibi.magnitude = dalibi.Root();
  expected->dsinks.magnitude = dsinks.Root();
  expected->amplification = weight > 0.0 ? amplified / weight : 1.0;
}

}  // namespace fa2::test
