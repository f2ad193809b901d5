// SPDX-License-Identifier: Apache-2.0

// A call as a list of sequences: the batches of a dense call, or the pieces
// between the prefix sums of a packed one.
#ifndef FA2_SRC_REFERENCE_SEQUENCES_H_
#define FA2_SRC_REFERENCE_SEQUENCES_H_

#include <cstdint>
#include <vector>

#include "fa2/attention.h"

namespace fa2::reference {

struct Sequence {
  int64_t index = 0;  // the b of dropout's and the padded statistics' formulas
  int64_t batch = 0;  // dimension 0 of q, k, v and their gradients
  int64_t q_begin = 0;  // first row of q, out, dout, dq
  int64_t k_begin = 0;  // first row of k, v, dk, dv
  int64_t nq = 0;
  int64_t nk = 0;
};

struct Sequences {
  std::vector<Sequence> list;
  int64_t max_q = 0;  // Mq and Mk of dropout's mapping
  int64_t max_k = 0;
  bool packed = false;
};

Sequences SequencesOf(const ConstTensorView& q, const ConstTensorView& k,
                      const AttentionOptions& options);

// One value per query row, [B, H, Nq, 1]; of a packed call [1, H, total_q, 1]
// or padded, [sequences, H, >= longest, 1].
double LoadStatistic(const ConstTensorView& view, const Sequences& sequences,
                     const Sequence& sequence, int64_t head, int64_t i);
void StoreStatistic(const TensorView& view, const Sequences& sequences,
                    const Sequence& sequence, int64_t head, int64_t i,
                    double value);

}  // namespace fa2::reference

#endif  // FA2_SRC_REFERENCE_SEQUENCES_H_
