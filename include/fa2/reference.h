// SPDX-License-Identifier: Apache-2.0

// The float64 oracle: attention by plain loops, for checking fa2's kernels and
// anybody else's. Slow, on one thread. It works row by row, so that no O(Nq *
// Nk) matrix is ever held: memory is the outputs and one head's inputs in f64.
#ifndef FA2_REFERENCE_H_
#define FA2_REFERENCE_H_

#include "fa2/attention.h"
#include "fa2/export.h"
#include "fa2/status.h"

namespace fa2 {

// The arguments of AttentionForward and AttentionBackward with all their
// mathematics; every output may be f64, f32, bf16 or f16 whatever the inputs
// are, and every input view may have its own dtype. All arithmetic is in
// double, rounded once when stored. kInvalidArgument for views that do not fit
// each other, kOutOfMemory where memory ends; nothing has then been written.
FA2_EXPORT Status AttentionReferenceForward(const AttentionForwardArgs& args);
FA2_EXPORT Status AttentionReferenceBackward(const AttentionBackwardArgs& args);

}  // namespace fa2

#endif  // FA2_REFERENCE_H_
