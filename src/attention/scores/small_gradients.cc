// SPDX-License-Identifier: Apache-2.0
#include "src/attention/scores/small_gradients.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace fa2::attention {

SmallGradients::SmallGradients(const AttentionBackwardArgs& args,
                               const Problem& problem, int64_t sink_terms,
                               int64_t alibi_terms,
                               threading::ScratchLayout* layout)
    : args_(args),
      problem_(problem),
      sink_count_(args.dsinks.given() ? sink_terms : 0),
      alibi_count_(args.dalibi_slopes.given() ? alibi_terms : 0) {
  sink_terms_ =
      layout->Take<double>(static_cast<size_t>(sink_count_ * problem.q_heads));
  alibi_terms_ =
      layout->Take<double>(static_cast<size_t>(alibi_count_ * problem.q_heads));
}

void SmallGradients::Clear() const {
  std::fill_n(sink_terms_, sink_count_ * problem_.q_heads, 0.0);
  std::fill_n(alibi_terms_, alibi_count_ * problem_.q_heads, 0.0);
}

void SmallGradients::AddToSink(int64_t sequence, int64_t head, int64_t query,
                               double lse, double delta, int64_t term) const {
  float sink;
  memcpy(&sink, At(problem_.options.sinks, 0, head, 0), sizeof(sink));
  const Sequence& s = problem_.sequences[sequence];
  const Interval keys = s.mask.Keys(query);
  // A row that sees no key leaves all its probability to the sink, whatever its
  // lse says.
  const bool seen =
      !keys.empty() && problem_.AnyListed(s, head, {query, query + 1}, keys);
  const double p = seen ? std::exp(static_cast<double>(sink) - lse) : 1.0;
  sink_terms_[head * sink_count_ + term] -= p * delta;
}

void SmallGradients::StoreNumber(const TensorView& out, int64_t batch,
                                 int64_t head, double value) {
  *reinterpret_cast<float*>(At(out, batch, head, 0)) =
      static_cast<float>(value);
}

void SmallGradients::StoreSinks() const {
  for (int64_t h = 0; h < problem_.q_heads; ++h) {
    double sum = 0.0;
    for (int64_t i = 0; i < sink_count_; ++i) {
      sum += sink_terms_[h * sink_count_ + i];
    }
    StoreNumber(args_.dsinks, 0, h, sum);
  }
}

}  // namespace fa2::attention
