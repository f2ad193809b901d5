// SPDX-License-Identifier: Apache-2.0

// Where a NaN or an infinity of an input goes in the sums over queries or keys.
//
// 0 * NaN is NaN inside a tile product, so a masked (0) element of P or dS
// would let a NaN of a row that is not seen into a sum. The engines therefore
// get those operands with their non-finite elements as 0, at no cost for finite
// data, and what these elements do to the rows that see them is added here.
#ifndef FA2_SRC_ATTENTION_SCORES_NON_FINITE_H_
#define FA2_SRC_ATTENTION_SCORES_NON_FINITE_H_

#include "src/attention/call/problem.h"
#include "src/threading/team.h"

namespace fa2::attention {

enum class NonFinite {
  // Its factor (dS) is itself not finite or of unknown sign.
  kBecomesNaN,
  // Its factor (P) is not negative: an infinity keeps its sign.
  kIsAdded,
};

// For every non-finite element (query i, d) of `source` [B, Hq, Nq, *]: changes
// element (key j, d) of `target` [B, Hkv, Nk, *] for all keys j that i sees.
void SpreadFromQueries(const Problem& problem, const ConstTensorView& source,
                       const TensorView& target, NonFinite how,
                       threading::Team& team);

// For every non-finite element (key j, d) of `source` [B, Hkv, Nk, *]: changes
// element (query i, d) of `target` [B, Hq, Nq, *] for all queries i that see j.
void SpreadFromKeys(const Problem& problem, const ConstTensorView& source,
                    const TensorView& target, NonFinite how,
                    threading::Team& team);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCORES_NON_FINITE_H_
