// SPDX-License-Identifier: Apache-2.0

// The forward's workspace, seen as what the algorithm names: packed keys and
// values of a head batch, the state of a worker's query block.
#ifndef FA2_SRC_ATTENTION_FORWARD_BUFFERS_H_
#define FA2_SRC_ATTENTION_FORWARD_BUFFERS_H_

#include <cstddef>
#include <cstdint>

#include "fa2/attention.h"
#include "src/attention/call/pass_call.h"
#include "src/attention/schedule/forward_plan.h"
#include "src/attention/scores/alibi_reach.h"
#include "src/attention/scores/bias_tiles.h"
#include "src/attention/scores/block_scores.h"
#include "src/attention/tensors/read_ahead.h"
#include "src/attention/tensors/row_buffers.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

using ForwardInputs = PassInputs<AttentionForwardArgs, ForwardPlan>;
class ForwardBuffers;

// What the workers at a head batch share: [head][row of the batch's sequences].
struct alignas(threading::kWorkspaceAlignment) ForwardBatch {
  ForwardBatch(const ForwardBuffers& call, threading::ScratchLayout* layout);

  // Packed K and V of a block; with keys in turn of the one under way.
  std::byte* K(const BlockId& keys) const;
  std::byte* V(const BlockId& keys) const;

  const HeadBatch* heads = nullptr;  // under way
  const HeadBatch* next = nullptr;   // that its worker reads ahead

 private:
  int64_t Row(const BlockId& keys) const;

  const ForwardInputs& in_;
  std::byte *k_score_, *v_grad_;
};

// What one worker alone uses: the running state of one block of queries.
struct alignas(threading::kWorkspaceAlignment) ForwardWorker {
  ForwardWorker(const ForwardBuffers& call, threading::ScratchLayout* layout);

  ForwardBatch* batch = nullptr;
  BlockScores scores;
  RowBuffers rows;
  ReadAhead ahead;
  std::byte *q_score, *engine_scratch, *out;
  std::byte *row_max, *row_sum;
  std::byte* row_weight;  // row_sum unless the engine keeps one of its own
};

// Of the call.
class ForwardBuffers {
 public:
  ForwardBuffers(const ForwardInputs& inputs, threading::ScratchLayout* layout);

  ForwardBatch* batches() const { return batches_; }
  ForwardWorker& worker(int index) const { return workers_[index]; }

  // Before anything is computed.
  void Clear() const;

  // Whether a block of V, or any, holds a NaN or an infinity. Written only
  // then: flags of several workers' blocks share cache lines.
  uint8_t& VNonFinite(const BlockId& keys) const;
  bool AnyVNonFinite() const;

  const ForwardInputs& in;
  BiasTiles bias_tiles;
  AlibiReach alibi_reach;

 private:
  uint8_t* v_non_finite_;  // [head][key block of all sequences]
  ForwardBatch* batches_;
  ForwardWorker* workers_;
};

using ForwardState = PassState<ForwardInputs, ForwardBuffers>;

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_FORWARD_BUFFERS_H_
