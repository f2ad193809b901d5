// The float64 oracle: attention by plain loops, for checking fa2's kernels and
// anybody else's. Slow: it works row by row and needs no O(Nq * Nk) memory.
#ifndef FA2_REFERENCE_H_
#define FA2_REFERENCE_H_

#include "fa2/attention.h"
#include "fa2/export.h"
#include "fa2/status.h"

namespace fa2 {

// The arguments of AttentionForward and AttentionBackward with all their
// mathematics; every output may be f64, f32, bf16 or f16 whatever the inputs
// are, and every input view may have its own dtype. All arithmetic is in
// double, rounded once when stored.
FA2_EXPORT Status AttentionReferenceForward(const AttentionForwardArgs& args);
FA2_EXPORT Status AttentionReferenceBackward(const AttentionBackwardArgs& args);

}  // namespace fa2

#endif  // FA2_REFERENCE_H_
