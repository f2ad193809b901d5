// SPDX-License-Identifier: Apache-2.0
#ifndef FA2_SRC_ATTENTION_SCHEDULE_KEYS_AS_THEY_LIE_H_
#define FA2_SRC_ATTENTION_SCHEDULE_KEYS_AS_THEY_LIE_H_

#include "src/attention/call/problem.h"
#include "src/simd/engine.h"

namespace fa2::attention {

// Whether K and V are taken from the tensors as they lie: where packing would
// only copy their rows, and so few queries come to them that the copy does not
// pay.
bool TakeKeysAsTheyLie(const Problem& problem, const simd::Engine& engine);

// Whether the forward takes K from the tensor as it lies, by an engine that
// packs V: dense rows that fill whole panels, and few enough queries of a head.
bool TakeKAsItLies(const Problem& problem, const simd::Engine& engine);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_KEYS_AS_THEY_LIE_H_
