// SPDX-License-Identifier: Apache-2.0

// Sums of squares of the terms that results are summed from: what rounding each
// term once would leave of an error.
#include <algorithm>
#include <cmath>

#include "src/verify/model/head_block.h"

namespace fa2::verify {
namespace {

// A score's absolute error, in roundings of the type it is summed in, per unit
// of its size; terms that cancel leave more than the sum shows.
constexpr double kScoreError = 2.0;

// The same over what one rounding of a product's operand costs.
double ScoreError(Products products) {
  const double sum = products == Products::kF64 ? 0x1p-53 : 0x1p-24;
  return kScoreError * sum / std::max(UnitRoundoff(products), sum);
}

// Below its smallest normal number, 2^-14, f16 rounds by a fixed 2^-25, as much
// as a rounding of 2^-14 may err: no term counts for less. The other types'
// smallest numbers lie below any sum's.
double LeastTerm(Products products) {
  return products == Products::kF16 ? 0x1p-14 : 0.0;
}

}  // namespace

template <class T>
void AddOutMagnitude(const HeadOperands<T>& h, const Block<T>& b, int64_t r,
                     double normaliser, HeadResults<T>* results) {
  const T* p = b.row(b.p, r);
  const T* s = b.row(b.scores, r);
  const auto i = static_cast<size_t>(b.begin + r);
  const double lse = std::abs(results->lse[i]);
  const double score_error = ScoreError(h.model.products);
  const double least = LeastTerm(h.model.products);
  double sum = 0.0;
  for (int64_t j = 0; j < b.width; ++j) {
    if (p[j] == T(0)) continue;
    const double a =
        normaliser *
        (least + p[j] * (1.0 + score_error * (std::abs(double(s[j])) + lse)));
    sum += a * a * h.v_squares[static_cast<size_t>(b.lo + j)];
  }
  results->out_squares[i] =
      static_cast<float>(sum / static_cast<double>(h.value_depth));
}

template <class T>
void AddGradientMagnitudes(const HeadOperands<T>& h, const Block<T>& b,
                           int64_t r, double delta, HeadResults<T>* results) {
  const Problem& problem = h.problem;
  const T* p = b.row(b.p, r);
  const T* s = b.row(b.scores, r);
  const int64_t query = b.begin + r;
  const auto i = static_cast<size_t>(query);
  const double lse = std::abs(results->lse[i]);
  const double score_error = ScoreError(h.model.products);
  const double dout2 = h.dout_squares[i];
  double out2 = 0.0;
  for (int64_t c = 0; c < h.value_depth; ++c) {
    const double o =
        results->out[static_cast<size_t>(query * h.value_depth + c)];
    if (std::isfinite(o)) out2 += o * o;
  }
  const auto columns = static_cast<double>(h.value_depth);
  const double delta2 = std::max(dout2 * out2 / columns, delta * delta * 1e-6);
  const double q2 = h.q_squares[i];
  const double scale2 =
      problem.scale * problem.scale / static_cast<double>(h.depth);
  const double keep2 = h.dropout ? h.keep_scale * h.keep_scale : 1.0;
  // Some kernels round dS after they have multiplied it by the scale.
  const double least_p = LeastTerm(h.model.products);
  const double least_ds =
      least_p == 0.0
          ? 0.0
          : least_p / std::clamp(std::abs(problem.scale), least_p, 1.0);
  double sum = 0.0;
  for (int64_t j = 0; j < b.width; ++j) {
    if (p[j] == T(0)) continue;
    const auto key = static_cast<size_t>(b.lo + j);
    const double a =
        p[j] * (1.0 + score_error * (std::abs(double(s[j])) + lse));
    const double pa2 = a * a * keep2 + least_p * least_p;
    const double ds2 =
        a * a * keep2 * (dout2 * h.v_squares[key] / columns * keep2 + delta2) +
        least_ds * least_ds;
    sum += ds2 * h.k_squares[key];
    results->dk_squares[key] += static_cast<float>(ds2 * q2 * scale2);
    results->dv_squares[key] += static_cast<float>(pa2 * dout2 / columns);
    if (problem.alibi_slopes.given()) {
      const double distance = AlibiDistance(h, h.model.faults, query, b.lo + j);
      results->dalibi_squares += ds2 * distance * distance;
    }
  }
  results->dq_squares[i] = static_cast<float>(sum * scale2);
}

template void AddOutMagnitude(const HeadOperands<float>&, const Block<float>&,
                              int64_t, double, HeadResults<float>*);
template void AddOutMagnitude(const HeadOperands<double>&, const Block<double>&,
                              int64_t, double, HeadResults<double>*);
template void AddGradientMagnitudes(const HeadOperands<float>&,
                                    const Block<float>&, int64_t, double,
                                    HeadResults<float>*);
template void AddGradientMagnitudes(const HeadOperands<double>&,
                                    const Block<double>&, int64_t, double,
                                    HeadResults<double>*);

}  // namespace fa2::verify
