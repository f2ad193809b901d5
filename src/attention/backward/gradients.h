// SPDX-License-Identifier: Apache-2.0

// Epilogue and reduction of the backward pass: partials summed in order,
// scaled, rounded and stored.
#ifndef FA2_SRC_ATTENTION_BACKWARD_GRADIENTS_H_
#define FA2_SRC_ATTENTION_BACKWARD_GRADIENTS_H_

#include "src/attention/backward/buffers.h"

namespace fa2::attention {

// Adds the second partial of dK and dV of a block of keys to the first, and
// leaves it empty.
void JoinKeyGradients(const BackwardState& call, const WorkerBuffers& worker,
                      const BlockId& id);

// Stores dK and dV of a block of keys, as far as they are wanted.
void StoreKeyGradients(const BackwardState& call, const WorkerBuffers& worker,
                       const BlockId& id);

// Stores dQ of a block of queries.
void StoreQueryGradient(const BackwardState& call, const WorkerBuffers& worker,
                        const BlockId& id);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_BACKWARD_GRADIENTS_H_
