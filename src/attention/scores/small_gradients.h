// SPDX-License-Identifier: Apache-2.0

// dsinks and dalibi_slopes: one number a head, from terms that are summed in
// one order at the end.
#ifndef FA2_SRC_ATTENTION_SCORES_SMALL_GRADIENTS_H_
#define FA2_SRC_ATTENTION_SCORES_SMALL_GRADIENTS_H_

#include <cstdint>

#include "fa2/attention.h"
#include "src/attention/call/problem.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

class SmallGradients {
 public:
  // The terms of a query head: as many of its sink, and of its slope, those of
  // a sequence after those of the one before.
  SmallGradients(const AttentionBackwardArgs& args, const Problem& problem,
                 int64_t sink_terms, int64_t alibi_terms,
                 threading::ScratchLayout* layout);

  bool wants_sinks() const { return args_.dsinks.given(); }
  bool wants_alibi() const { return args_.dalibi_slopes.given(); }
  void Clear() const;

  // Adds what a query of lse and delta has of the gradient of its head's sink.
  void AddToSink(int64_t sequence, int64_t head, int64_t query, double lse,
                 double delta, int64_t term) const;
  double& AlibiTerm(int64_t head, int64_t term) const {
    return alibi_terms_[head * alibi_count_ + term];
  }

  // When all has been added. terms_of(sequence): how many terms a slope has of
  // it.
  template <class TermsOf>
  void Store(const TermsOf& terms_of) const {
    if (wants_sinks()) StoreSinks();
    if (!wants_alibi()) return;
    const TensorView& out = args_.dalibi_slopes;
    const bool per_sequence = out.sizes[0] != 1;
    for (int64_t h = 0; h < problem_.q_heads; ++h) {
      double sum = 0.0;
      int64_t term = 0;
      for (size_t i = 0; i < problem_.sequences.size(); ++i) {
        const int64_t s = static_cast<int64_t>(i);
        for (int64_t n = terms_of(s); n > 0; --n) sum += AlibiTerm(h, term++);
        if (per_sequence) {
          StoreNumber(out, s, h, sum);
          sum = 0.0;
        }
      }
      if (!per_sequence) StoreNumber(out, 0, h, sum);
    }
  }

 private:
  static void StoreNumber(const TensorView& out, int64_t batch, int64_t head,
                          double value);
  void StoreSinks() const;

  const AttentionBackwardArgs& args_;
  const Problem& problem_;
  int64_t sink_count_, alibi_count_;  // of a head
  double* sink_terms_;
  double* alibi_terms_;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCORES_SMALL_GRADIENTS_H_
