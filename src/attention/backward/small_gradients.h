// SPDX-License-Identifier: Apache-2.0

// dsinks and dalibi_slopes: one number a head, from terms that are summed in
// one order at the end.
#ifndef FA2_SRC_ATTENTION_BACKWARD_SMALL_GRADIENTS_H_
#define FA2_SRC_ATTENTION_BACKWARD_SMALL_GRADIENTS_H_

#include <cstdint>

#include "src/attention/backward/bias_gradient.h"
#include "src/attention/schedule/blocks.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

class SmallGradients {
 public:
  SmallGradients(const BackwardInputs& inputs,
                 threading::ScratchLayout* layout);

  bool wants_sinks() const { return in_.args.dsinks.given(); }
  bool wants_alibi() const { return in_.args.dalibi_slopes.given(); }
  void Clear() const;

  // The term of dsinks that a query adds to: one for each panel of kTileQueries
  // queries, whatever the sizes of blocks.
  double& SinkTerm(int64_t sequence, int64_t head, int64_t query) const;
  // The term of dalibi_slopes that pairs of a key block and a query head add
  // to.
  double& AlibiTerm(const BlockPair& pair) const;

  // When all has been added.
  void Store() const;

 private:
  int64_t SinkTerms() const;  // of a head

  const BackwardInputs& in_;
  double* sink_terms_;   // [query head][panel]
  double* alibi_terms_;  // [query head][key block of all sequences]
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_BACKWARD_SMALL_GRADIENTS_H_
