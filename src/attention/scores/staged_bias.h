// SPDX-License-Identifier: Apache-2.0

// Bias as engines read it, staged block by block. Where the elements of a batch
// share a bias that is small enough for a worker's L2, as windows of an image
// do, what one of them has staged stays for the next.
#ifndef FA2_SRC_ATTENTION_SCORES_STAGED_BIAS_H_
#define FA2_SRC_ATTENTION_SCORES_STAGED_BIAS_H_

#include <cstddef>
#include <cstdint>

#include "src/attention/call/problem.h"
#include "src/attention/schedule/blocks.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/staging.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

// One worker's.
class StagedBias {
 public:
  // `largest` bounds every block.
  StagedBias(const Problem& problem, const simd::Engine& engine,
             const simd::StagingKernels& staging,
             const simd::BlockSizes& largest, threading::ScratchLayout* layout);

  // The bias of a pair, `matrix` from its first query and key on; nullptr where
  // it hides all.
  const void* Of(const PairRows& pair, const simd::ScoreMatrix& matrix,
                 const simd::StagedShape& shape) const;

  // Whether blocks are staged anew each time.
  bool forgets() const { return slots_ == 1; }

 private:
  struct Slot {
    simd::ScoreMatrix matrix;  // data nullptr: empty
    simd::StagedShape shape;
    bool any = false;  // something is visible
  };

  int64_t SlotOf(const PairRows& pair) const;

  const Problem& problem_;
  const simd::StagingKernels& staging_;
  const simd::BlockSizes largest_;
  int64_t query_blocks_ = 1, key_blocks_ = 1;
  int64_t slots_ = 1;
  size_t slot_bytes_ = 0;
  Slot* slot_;
  std::byte* staged_;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCORES_STAGED_BIAS_H_
