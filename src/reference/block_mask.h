// SPDX-License-Identifier: Apache-2.0

// Block masks for the oracle: what a list must be so that nothing else is read,
// and which keys a query sees.
#ifndef FA2_SRC_REFERENCE_BLOCK_MASK_H_
#define FA2_SRC_REFERENCE_BLOCK_MASK_H_

#include <cstdint>
#include <vector>

#include "fa2/attention.h"

namespace fa2::reference {

Status CheckBlockMask(const BlockMask& mask, const ConstTensorView& q,
                      const ConstTensorView& k);

// For each row of k whether query row `i` of q sees it.
std::vector<bool> VisibleKeys(const BlockMask& mask, int64_t batch,
                              int64_t head, int64_t i, int64_t keys);

}  // namespace fa2::reference

#endif  // FA2_SRC_REFERENCE_BLOCK_MASK_H_
