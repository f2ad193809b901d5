// SPDX-License-Identifier: Apache-2.0

// What a worker packs next, prefetched while it computes blocks: the rows of a
// block or of a short head are read and packed in one go otherwise, and every
// line is waited for.
#ifndef FA2_SRC_ATTENTION_TENSORS_READ_AHEAD_H_
#define FA2_SRC_ATTENTION_TENSORS_READ_AHEAD_H_

#include <cstdint>
#include <initializer_list>

#include "src/attention/call/problem.h"
#include "src/attention/schedule/head_batches.h"
#include "src/simd/score_types.h"

namespace fa2::attention {

class ReadAhead {
 public:
  // Before `pairs` block pairs: nothing yet.
  void Begin(int64_t pairs);
  // Adds rows of a tensor.
  void Add(const ConstTensorView& tensor, const TensorRows& at);
  // Adds the head that is taken next, unless it is nullptr or several: all of
  // its queries and at most so many keys.
  void AddHead(const Problem& problem, const HeadBatch* next,
               std::initializer_list<const ConstTensorView*> of_queries,
               std::initializer_list<const ConstTensorView*> of_keys,
               int64_t most_keys);

  // Adds a block pair's share to what is prefetched in computing it.
  void TakeShare(simd::PrefetchList* list);

 private:
  int64_t pairs_ = 0;  // left
  int64_t bytes_ = 0;
  simd::PrefetchList rows_;  // left
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_TENSORS_READ_AHEAD_H_
