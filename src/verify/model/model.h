// SPDX-License-Identifier: Apache-2.0

// Attention forward and backward of one head by blocks of queries, in f64 or as
// a kernel rounds, right or with a mistake in it: the answer, the rounding twin
// and the mistakes are all this one computation.
#ifndef FA2_SRC_VERIFY_MODEL_MODEL_H_
#define FA2_SRC_VERIFY_MODEL_MODEL_H_

#include <cstdint>
#include <vector>

#include "src/verify/model/faults.h"
#include "src/verify/model/problem.h"
#include "src/verify/model/rounding.h"

namespace fa2::verify {

// Rows of a tile of the judgement.
inline constexpr int64_t kTileRows = 64;

// How one computation rounds. T = double with Products::kF64 is the answer.
struct Model {
  Products products = Products::kF64;
  DType out = DType::kF64;  // what O is stored as before delta is taken of it
  bool f32_lse = false;     // lse is stored as f32
  Faults faults;
  // O and lse are the candidate's, and only the gradients are computed.
  bool given = false;
  bool gradients = true;
  bool magnitudes = false;
};

// What sums in 16 bits are rounded to.
inline Products SumsIn16Bits(const Model& model) {
  const bool f16 =
      model.products == Products::kF16 || model.faults.rounded_to_f16;
  return f16 ? Products::kF16 : Products::kBF16;
}

// What the forward has written: the candidate's out and lse in f64.
struct Forward {
  Array4<double> out;  // [B, H, N, Dv]
  Array4<double> lse;  // [B, H, N, 1], natural
};
Forward CandidateForward(const Problem& problem);

// The error of one row, in relative errors of 1 of each of its roundings. Each
// rounding is an independent random number whose weight w is the mean square
// that it adds to an element of the row.
struct RowError {
  double squares = 0.0;  // sum of w: the mean square of an element's error
  double fourths = 0.0;  // sum of w^2: how few roundings hold most of it
  // Sum of w w' over roundings that reach other rows of the tile too, w' being
  // what they add to the whole tile: summed over its rows, their fourths.
  double shared = 0.0;
};

// Results of one query head of one sequence; dk and dv are its share alone.
template <class T>
struct HeadResults {
  std::vector<T> out, dq;          // [nq, D]
  std::vector<double> lse;         // [nq]
  std::vector<double> stored_lse;  // what a forward with this mistake writes
  std::vector<T> dk, dv;           // [nk, D]
  double dsink = 0.0;
  double dalibi = 0.0;
  // dS in the shape of bias without the leading two dimensions, summed over
  // those that it broadcasts.
  std::vector<double> dbias;
  // What rounding leaves in a row of each result; of a twin only.
  std::vector<RowError> out_error, dq_error, dk_error, dv_error, dbias_error;
  double dsink_squares = 0.0, dalibi_squares = 0.0;
};

template <class T>
HeadResults<T> RunHead(const Problem& problem, const Model& model,
                       const Forward* forward, const Sequence& sequence,
                       int64_t head, int64_t kv_head);

extern template HeadResults<float> RunHead(const Problem&, const Model&,
                                           const Forward*, const Sequence&,
                                           int64_t, int64_t);
extern template HeadResults<double> RunHead(const Problem&, const Model&,
                                            const Forward*, const Sequence&,
                                            int64_t, int64_t);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_MODEL_H_
