// SPDX-License-Identifier: Apache-2.0
#include "src/reference/scores.h"

#include <cmath>
#include <limits>

#include "src/common/philox.h"
#include "src/reference/block_mask.h"

namespace fa2::reference {
namespace {

// Whether query i sees key j, both counted within their sequence.
bool Visible(const AttentionOptions& options, int64_t i, int64_t j, int64_t nq,
             int64_t nk) {
  const int64_t bottom_right = i + nk - nq;
  if (options.causal == Causal::kTopLeft && j > i) return false;
  if (options.causal == Causal::kBottomRight && j > bottom_right) return false;
  const int64_t diagonal =
      options.causal == Causal::kTopLeft ? i : bottom_right;
  if (options.window_left >= 0 && diagonal - j > options.window_left) {
    return false;
  }
  if (options.window_right >= 0 && j - diagonal > options.window_right) {
    return false;
  }
  return true;
}

// What is added to the score; -inf masks. A boolean's false is -inf.
double Bias(const ConstTensorView& bias, int64_t b, int64_t h, int64_t i,
            int64_t j) {
  if (!bias.given()) return 0.0;
  const double value = Load(bias, b, h, i, j);
  if (bias.dtype != DType::kBool) return value;
  return value != 0.0 ? 0.0 : -std::numeric_limits<double>::infinity();
}

// Z: 0 or 1 / (1 - p).
double Keep(const AttentionOptions& options, const RowPlace& place, int64_t j) {
  if (options.dropout_p == 0.0) return 1.0;
  const uint64_t row =
      static_cast<uint64_t>((place.sequence.index * place.heads + place.head) *
                                place.sequences.max_q +
                            place.i);
  const uint64_t n = options.philox_offset +
                     row * static_cast<uint64_t>(place.sequences.max_k) +
                     static_cast<uint64_t>(j);
  return PhiloxKeep(options.dropout_p, options.philox_seed, n)
             ? 1.0 / (1.0 - options.dropout_p)
             : 0.0;
}

}  // namespace

std::vector<Score> ScoreRow(const AttentionOptions& options, double scale,
                            const RowPlace& place, const double* q_row,
                            const Matrix& k) {
  const int64_t nq = place.sequence.nq;
  const int64_t nk = place.sequence.nk;
  const double softcap = options.softcap;
  const double alibi_slope =
      options.alibi_slopes.given()
          ? Load(options.alibi_slopes, place.sequence.index, place.head, 0, 0)
          : 0.0;
  std::vector<bool> listed;
  if (options.block_mask != nullptr) {
    listed = VisibleKeys(*options.block_mask, place.sequence.batch, place.head,
                         place.sequence.q_begin + place.i,
                         place.sequence.k_begin + nk);
  }
  std::vector<Score> scores;
  for (int64_t j = 0; j < nk; ++j) {
    if (!Visible(options, place.i, j, nq, nk)) continue;
    if (!listed.empty() &&
        !listed[static_cast<size_t>(place.sequence.k_begin + j)]) {
      continue;
    }
    const double bias =
        Bias(options.bias, place.sequence.index, place.head, place.i, j);
    if (bias == -std::numeric_limits<double>::infinity()) continue;

    Score score;
    score.key = j;
    double s = scale * DotProduct(q_row, k.row(j), k.columns);
    if (softcap > 0.0) {
      const double tanh = std::tanh(s / softcap);
      s = softcap * tanh;
      score.cap_slope = 1.0 - tanh * tanh;
    }
    score.distance = std::abs(static_cast<double>(place.i + nk - nq - j));
    s += bias;
    if (options.alibi_slopes.given()) s -= alibi_slope * score.distance;
    score.value = s;
    score.keep = Keep(options, place, j);
    scores.push_back(score);
  }
  return scores;
}

double ScaleOf(const AttentionOptions& options, int64_t head_dim) {
  if (options.scale.has_value()) return *options.scale;
  return head_dim > 0 ? 1.0 / std::sqrt(static_cast<double>(head_dim)) : 1.0;
}

double DotProduct(const double* a, const double* b, int64_t n) {
  // Eight sums, so that compilers may use vectors.
  double sums[8] = {};
  int64_t d = 0;
  for (; d + 8 <= n; d += 8) {
    for (int lane = 0; lane < 8; ++lane)
      sums[lane] += a[d + lane] * b[d + lane];
  }
  double sum = 0.0;
  for (; d < n; ++d) sum += a[d] * b[d];
  for (const double lane : sums) sum += lane;
  return sum;
}

}  // namespace fa2::reference
