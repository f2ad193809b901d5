// SPDX-License-Identifier: Apache-2.0

// One row of the score matrix, S_ij for the keys j that query i sees: the part
// of the mathematics that forward and backward share.
#ifndef FA2_SRC_REFERENCE_SCORES_H_
#define FA2_SRC_REFERENCE_SCORES_H_

#include <cstdint>
#include <vector>

#include "fa2/attention.h"
#include "src/reference/sequences.h"
#include "src/reference/tensor_access.h"

namespace fa2::reference {

// A score of a visible key. Masked keys have no Score, so nothing they hold,
// NaN included, is ever read.
struct Score {
  int64_t key = 0;       // j
  double value = 0;      // S_ij
  double cap_slope = 1;  // dS_ij / d(scale q_i k_j): 1 - (S_capped / c)^2
  double distance = 0;   // |i + Nk - Nq - j|, what ALiBi's slope multiplies
  double keep = 1;       // Z_ij: 0 or 1 / (1 - p)
};

// Where the row stands, and the sequence's keys.
struct RowPlace {
  const Sequences& sequences;
  const Sequence& sequence;
  int64_t head;   // query head h
  int64_t heads;  // Hq
  int64_t i;      // query, counted within its sequence
};

std::vector<Score> ScoreRow(const AttentionOptions& options, double scale,
                            const RowPlace& place, const double* q_row,
                            const Matrix& k);

// options.scale, or 1 / sqrt(D).
double ScaleOf(const AttentionOptions& options, int64_t head_dim);

double DotProduct(const double* a, const double* b, int64_t n);

}  // namespace fa2::reference

#endif  // FA2_SRC_REFERENCE_SCORES_H_
