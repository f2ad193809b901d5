// SPDX-License-Identifier: Apache-2.0

// The operands of a block's products: each is packed once, or K and V are taken
// as they lie.
#ifndef FA2_SRC_ATTENTION_BACKWARD_OPERANDS_H_
#define FA2_SRC_ATTENTION_BACKWARD_OPERANDS_H_

#include "src/attention/backward/buffers.h"

namespace fa2::attention {

// Packs Q and dO of a block of queries, and prepares lse and delta.
void PackQueries(const BackwardState& call, const WorkerBuffers& worker,
                 const BlockId& id);

// Packs K and V of a block of keys; only looks at them where they are taken as
// they lie.
void PackKeys(const BackwardState& call, const WorkerBuffers& worker,
              const BlockId& id);

// Sets the keys of a block pair.
void TakeKeys(const BackwardState& call, const WorkerBuffers& worker,
              const BlockId& id, simd::BackwardBlock* block);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_BACKWARD_OPERANDS_H_
