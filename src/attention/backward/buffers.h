// SPDX-License-Identifier: Apache-2.0

// The backward's workspace, seen as what the algorithm names: packed operands,
// row statistics and partial sums of blocks.
//
// Three kinds of buffers: of the call, flags and sums of all blocks; of a head
// batch under way, what its workers share; of a worker.
#ifndef FA2_SRC_ATTENTION_BACKWARD_BUFFERS_H_
#define FA2_SRC_ATTENTION_BACKWARD_BUFFERS_H_

#include <cstddef>
#include <cstdint>

#include "src/attention/backward/bias_gradient.h"
#include "src/attention/backward/dq_semaphore.h"
#include "src/attention/call/pass_call.h"
#include "src/attention/scores/alibi_reach.h"
#include "src/attention/scores/bias_tiles.h"
#include "src/attention/scores/block_scores.h"
#include "src/attention/scores/small_gradients.h"
#include "src/attention/tensors/read_ahead.h"
#include "src/attention/tensors/row_buffers.h"
#include "src/threading/scratch_layout.h"
#include "src/threading/wavefront.h"

namespace fa2::attention {

class BackwardBuffers;

// Packed queries, by their role, and row statistics of one block.
struct QueryOperands {
  std::byte *q_score, *q_grad, *dout_score, *dout_grad;
  std::byte *lse, *delta;
};

// Packed keys of one block.
struct KeyOperands {
  std::byte *k_score, *k_grad, *v_score;
};

// A partial of dK and dV of one block, and the flag that says whether anything
// has been added to it.
struct DkvAccum {
  std::byte *dk, *dv;
  uint8_t* touched;
};

// Packed keys of some heads, and partials of their gradients.
struct KeyArrays {
  KeyArrays() = default;
  // Of `rows` rows a head; dK and dV are [head][partial][row].
  KeyArrays(const BackwardInputs& inputs, int64_t rows, int64_t heads,
            threading::ScratchLayout* layout);
  std::byte *k_score = nullptr, *k_grad = nullptr, *v_score = nullptr;
  std::byte *dk = nullptr, *dv = nullptr;
};

// What the workers at a head batch share: [head][row of the batch's sequences].
struct alignas(threading::kWorkspaceAlignment) BatchBuffers {
  BatchBuffers(const BackwardBuffers& call, threading::ScratchLayout* layout);

  const HeadBatch* heads = nullptr;  // under way
  const HeadBatch* next = nullptr;   // that its worker reads ahead
  std::byte *q_score, *q_grad, *dout_score, *dout_grad;
  std::byte *lse, *delta;
  std::byte* dq;   // [head][key split][row]
  KeyArrays keys;  // if the plan keeps them here
  threading::Wavefront::Task* tasks;
  threading::Wavefront::Counter* counters;
};

// What one worker alone uses, and its view of the head batch that it works at.
class alignas(threading::kWorkspaceAlignment) WorkerBuffers {
 public:
  WorkerBuffers(const BackwardBuffers& call, threading::ScratchLayout* layout);

  QueryOperands Queries(const BlockId& queries) const;
  KeyOperands Keys(const BlockId& keys) const;
  DqAccum Dq(const BlockId& queries, int64_t key_split) const;
  DkvAccum Dkv(const BlockId& keys, int64_t partial) const;

  BatchBuffers* batch = nullptr;
  BlockScores scores;
  RowBuffers rows;
  ReadAhead ahead;
  BiasGradient bias;
  std::byte* engine_scratch;
  std::byte* k_finite;  // K of one key block without NaN and inf

 private:
  const BackwardInputs& in_;
  const BackwardBuffers& call_;
  KeyArrays keys_;  // of one key block, unless the head batch has them
};

// Of the call.
class BackwardBuffers {
 public:
  BackwardBuffers(const BackwardInputs& inputs,
                  threading::ScratchLayout* layout);

  // Before anything is computed.
  void Clear() const;

  BatchBuffers* batches() const { return batches_; }
  WorkerBuffers& worker(int index) const { return workers_[index]; }

  // Whether a block holds a NaN or an infinity. Written only then: flags of
  // several workers' blocks share cache lines.
  uint8_t& QNonFinite(const BlockId& queries) const {
    return q_non_finite_[QueryFlag(queries)];
  }
  uint8_t& DoutNonFinite(const BlockId& queries) const {
    return dout_non_finite_[QueryFlag(queries)];
  }
  uint8_t& KNonFinite(const BlockId& keys) const {
    return k_non_finite_[KeyFlag(keys)];
  }
  // Whether any of all blocks does.
  bool AnyQNonFinite() const;
  bool AnyDoutNonFinite() const;
  bool AnyKNonFinite() const;

  // Whether anything has been added to a partial.
  uint8_t* DqTouched(const BlockId& queries, int64_t key_split) const;
  uint8_t* DkvTouched(const BlockId& keys, int64_t partial) const;

 private:
  // Index among the blocks of all heads: [head][block of all sequences].
  int64_t QueryFlag(const BlockId& queries) const;
  int64_t KeyFlag(const BlockId& keys) const;

 public:
  const BackwardInputs& in;
  BiasTiles bias_tiles;
  AlibiReach alibi_reach;
  BiasGradientSums bias_sums;
  SmallGradients small;

 private:
  uint8_t *dq_touched_, *dkv_touched_;
  uint8_t *q_non_finite_, *dout_non_finite_, *k_non_finite_;
  BatchBuffers* batches_;
  WorkerBuffers* workers_;
};

using BackwardState = PassState<BackwardInputs, BackwardBuffers>;

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_BACKWARD_BUFFERS_H_
