// SPDX-License-Identifier: Apache-2.0

// A case with its sizes checked and its inputs in f64: what the answer, the
// twin and the mistakes are computed from.
#ifndef FA2_SRC_VERIFY_MODEL_PROBLEM_H_
#define FA2_SRC_VERIFY_MODEL_PROBLEM_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fa2/attention.h"
#include "src/verify/cases/case.h"
#include "src/verify/model/array4.h"
#include "src/verify/model/logical_tensor.h"

namespace fa2::verify {

struct Sequence {
  int64_t index = 0;    // b of bias, dropout and padded statistics
  int64_t batch = 0;    // dimension 0 of q, k, v and their gradients
  int64_t q_begin = 0;  // first row
  int64_t k_begin = 0;
  int64_t nq = 0;
  int64_t nk = 0;
};

struct Problem {
  Case source;  // owns what the views point to
  Options options;
  double scale = 1.0;
  bool packed = false;
  int64_t batch = 0, heads = 0, kv_heads = 0, nq = 0, nk = 0;  // as stored
  int64_t head_dim = 0, value_dim = 0;
  int64_t max_q = 0, max_k = 0;  // of the sequences
  std::vector<Sequence> sequences;

  Array4<double> q, k, v, dout;
  // q, or k, is what the products take: a kernel rounds it no more.
  bool q_rounded = false, k_rounded = false;
  Array4<double> dlse;  // [B, H, N, 1]
  Array4<double> bias;  // -inf masks; sizes of 1 broadcast
  bool bias_is_mask = false;
  Array4<float> sinks;         // [1, H, 1, 1]
  Array4<float> alibi_slopes;  // [B or 1, H, 1, 1]
  LogicalTensor keep;
  std::vector<int64_t> cu_q, cu_k;

  // The candidate's tensors that are there, by name.
  std::map<std::string, LogicalTensor> outputs;
  // Outputs that this call has and the candidate has not.
  std::vector<std::string> unchecked;

  Products products = Products::kF32;

  int64_t group() const { return heads / kv_heads; }
  const LogicalTensor* Output(const std::string& name) const;
  // Shape of an output as a logical tensor.
  Sizes SizesOf(const std::string& name) const;
  // lse of query head h, row i of a sequence, in the candidate's tensor; in
  // natural logarithms whatever base is declared.
  double CandidateLse(const Sequence& sequence, int64_t h, int64_t i) const;
  // Where row i of a sequence is in a statistic, which may be padded.
  Sizes StatisticIndex(const LogicalTensor& statistic, const Sequence& sequence,
                       int64_t h, int64_t i) const;
  // The index of lse's value.
  Sizes LseIndex(const Sequence& sequence, int64_t h, int64_t i) const;
};

// Throws Error for what is missing or does not fit.
Problem MakeProblem(const Case& source);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_PROBLEM_H_
