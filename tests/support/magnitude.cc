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

// Sums of the squares of terms, of each row or of each element of a tensor;
// Root() turns them into magnitudes of an element. Errors that are equal add up
// in phase: then sums of the terms' sizes.
class Squares {
 public:
  Squares(const Sizes& sizes, bool of_elements, bool in_phase)
      : columns_(of_elements
                     ? 1.0
                     : static_cast<double>(std::max<int64_t>(sizes[3], 1))),
        in_phase_(in_phase) {
    tensor_ = MakeTensor(DType::kF64, {sizes[0], sizes[1], sizes[2],
                                       of_elements ? sizes[3] : 1});
    Fill(tensor_.view, 0.0);
  }
  // `square`: of the whole row. Sizes of 1 are summed over.
  void Add(int64_t b, int64_t h, int64_t i, int64_t j, double square) {
    const int64_t offset = ref::OffsetOf(tensor_.view, b, h, i, j);
    const double of_element = square / columns_;
    static_cast<double*>(tensor_.view.data)[offset] +=
        in_phase_ ? std::sqrt(of_element) : of_element;
  }
  Tensor Root() {
    if (in_phase_) return tensor_;
    ForEachIndex(tensor_.view.sizes, [&](const Sizes& at) {
      Set(tensor_.view, at, std::sqrt(Get(tensor_.view, at)));
    });
    return tensor_;
  }

 private:
  double columns_;
  bool in_phase_;
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

double Dot(const double* x, const double* y, int64_t n) {
  double sum = 0.0;
  for (int64_t d = 0; d < n; ++d) sum += x[d] * y[d];
  return sum;
}

// The larger of a mean square and the square of what there is, if it is finite.
double SquareOf(double mean_square, double value) {
  return std::isfinite(value) ? std::max(mean_square, value * value)
                              : mean_square;
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
  // Rows of dout that are one row have one rounding, and one error of dP -
  // delta where they see one key. What sums over them sums these in phase.
  const bool in_phase = c.dout_broadcast[1] || c.dout_broadcast[2];
  Squares out(inputs.dout.view.sizes, false, false);
  Squares dq(inputs.q.view.sizes, false, false);
  Squares dk(inputs.k.view.sizes, false, false);
  Squares dv(inputs.v.view.sizes, false, in_phase);
  Squares dbias(SizesOr(inputs.bias), true, in_phase);
  Squares dalibi(SizesOr(inputs.alibi_slopes), true, in_phase);
  Squares dsinks(SizesOr(inputs.sinks), true, in_phase);
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
      const ref::Matrix v = load(inputs.v, kv_head, true);
      const ref::Matrix dout = load(inputs.dout, h, false);
      const ref::Matrix o =
          load(inputs.out.given() ? inputs.out : expected->out.value, h, false);
      const auto q2 = SquaredLengths(q, seq.nq);
      const auto k2 = SquaredLengths(k, seq.nk);
      const auto v2 = SquaredLengths(v, seq.nk);
      const auto dout2 = SquaredLengths(dout, seq.nq);
      const auto out2 = SquaredLengths(o, seq.nq);
      for (int64_t i = 0; i < seq.nq; ++i) {
        const int64_t row = seq.q_begin + i;
        const double lse =
            ref::LoadStatistic(inputs.lse.view, sequences, seq, h, i);
        const double dlse =
            inputs.dlse.given()
                ? ref::LoadStatistic(inputs.dlse.view, sequences, seq, h, i)
                : 0.0;
        const double delta = Dot(o.row(i), dout.row(i), c.value_dim) - dlse;
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
          // A score of -inf adds nothing.
          const double pa = p > 0.0 ? p * a : p;
          if (std::isfinite(pa)) {
            amplified += pa;
            weight += p;
          }
          const double pz2 = pa * pa * s.keep * s.keep;
          const double dp2 = dout2[i] * v2[j] / value_columns * s.keep * s.keep;
          // dP may be larger than rows of its size make it at random.
          const double dp = s.keep * Dot(dout.row(i), v.row(j), c.value_dim);
          const double ds2 = pa * pa * SquareOf(dp2 + delta2, dp - delta);
          const double scaled = ds2 * scale * scale;
          out.Add(seq.batch, h, row, 0, pz2 * v2[j]);
          dv.Add(seq.batch, kv_head, seq.k_begin + j, 0, pz2 * dout2[i]);
          dq.Add(seq.batch, h, row, 0, scaled * k2[j]);
          dk.Add(seq.batch, kv_head, seq.k_begin + j, 0, scaled * q2[i]);
          dbias.Add(seq.index, h, i, j, ds2);
          dalibi.Add(seq.index, h, 0, 0, ds2 * s.distance * s.distance);
        }
        if (options.sinks.given()) {
          const double sink = ref::Load(options.sinks, 0, h, 0, 0);
          const double p = std::isfinite(lse) ? std::exp(sink - lse) : 0.0;
          const double a = 1.0 + score_error * (std::abs(sink) + std::abs(lse));
          dsinks.Add(0, h, 0, 0, p * p * a * a * delta2);
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
  for (Expected* gradient :
       {&expected->dq, &expected->dk, &expected->dv, &expected->dbias,
        &expected->dalibi, &expected->dsinks}) {
    gradient->one_error = in_phase;
  }
  expected->amplification = weight > 0.0 ? amplified / weight : 1.0;
}

}  // namespace fa2::test
