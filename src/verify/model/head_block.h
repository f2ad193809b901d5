// SPDX-License-Identifier: Apache-2.0

// A block of queries of one head against all keys that it sees, and the passes
// over it.
#ifndef FA2_SRC_VERIFY_MODEL_HEAD_BLOCK_H_
#define FA2_SRC_VERIFY_MODEL_HEAD_BLOCK_H_

#include <cstdint>
#include <vector>

#include "src/verify/model/head_operands.h"
#include "src/verify/model/visibility.h"

namespace fa2::verify {

template <class T>
struct Block {
  int64_t begin = 0, rows = 0;  // queries
  // Keys [lo, hi), and how many: the width of the arrays.
  int64_t lo = 0, hi = 0, width = 0;
  std::vector<KeyRange> ranges;  // of each row
  std::vector<double> maxima;    // of each row's scores; -inf: sees no key
  // [rows, width]; masked scores are -inf. cap_slope is softcap's derivative.
  std::vector<T> scores, cap_slope, keep, p, dp, ds;
  std::vector<T> part;  // scratch of a product
  // Of each row, for magnitudes: mean square of delta's error.
  std::vector<double> delta_errors;

  T* row(std::vector<T>* x, int64_t r) const { return x->data() + r * width; }
  const T* row(const std::vector<T>& x, int64_t r) const {
    return x.data() + r * width;
  }
};

// Scores and maxima of the block's rows, with one pass's mistakes.
template <class T>
void ComputeScores(const HeadOperands<T>& head, const Faults& faults,
                   Block<T>* block);

// 1 where dropout keeps an element, else 0.
template <class T>
void ReadKeep(const HeadOperands<T>& head, const Faults& faults,
              Block<T>* block);

// out, lse and stored_lse of the block's rows.
template <class T>
void ForwardBlock(const HeadOperands<T>& head, const Faults& faults,
                  Block<T>* block, HeadResults<T>* results);

// Everything that the block adds to gradients.
template <class T>
void BackwardBlock(const HeadOperands<T>& head, const Faults& faults,
                   Block<T>* block, HeadResults<T>* results);

// |i - j| from the diagonal that ALiBi counts from.
template <class T>
double AlibiDistance(const HeadOperands<T>& head, const Faults& faults,
                     int64_t i, int64_t j);

// What a backward subtracts from the scores of query i, of maximum `max`.
template <class T>
double LseInBackward(const HeadOperands<T>& head, const Faults& faults,
                     double lse, double max);

// What roundings leave in row r of out, and in the gradients, where the block
// has the row's exponentials in p and its dP as the product gives it. The
// second returns the mean square of delta's error.
template <class T>
void AddOutMagnitude(const HeadOperands<T>& head, const Block<T>& block,
                     int64_t r, double normaliser, HeadResults<T>* results);
template <class T>
double AddGradientMagnitudes(const HeadOperands<T>& head, const Block<T>& block,
                             int64_t r, double delta, HeadResults<T>* results);
// The error of delta in dQ, where a row's terms err alike; P is in p.
template <class T>
void AddDeltaMagnitudes(const HeadOperands<T>& head, Block<T>* block,
                        HeadResults<T>* results);
// Of dK and dV of one query head, which some kernels store before they sum the
// group's.
template <class T>
void AddShareMagnitudes(const HeadOperands<T>& head, HeadResults<T>* results);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_HEAD_BLOCK_H_
