// SPDX-License-Identifier: Apache-2.0
#include "src/attention/backward/small_gradients.h"

#include <algorithm>

namespace fa2::attention {

SmallGradients::SmallGradients(const BackwardInputs& inputs,
                               threading::ScratchLayout* layout)
    : in_(inputs) {
  const int64_t heads = inputs.problem.q_heads;
  sink_terms_ = layout->Take<double>(
      wants_sinks() ? static_cast<size_t>(SinkTerms() * heads) : 0);
  alibi_terms_ = layout->Take<double>(
      wants_alibi() ? static_cast<size_t>(inputs.plan.k_blocks * heads) : 0);
}

int64_t SmallGradients::SinkTerms() const {
  return PanelsBefore(in_.plan.q_rows,
                      static_cast<int64_t>(in_.plan.sequences.size()),
                      simd::kTileQueries);
}

void SmallGradients::Clear() const {
  const int64_t heads = in_.problem.q_heads;
  if (wants_sinks()) std::fill_n(sink_terms_, SinkTerms() * heads, 0.0);
  if (wants_alibi()) {
    std::fill_n(alibi_terms_, in_.plan.k_blocks * heads, 0.0);
  }
}

double& SmallGradients::SinkTerm(int64_t sequence, int64_t head,
                                 int64_t query) const {
  const int64_t panel = PanelsBefore(in_.plan.sequences[sequence].q_row,
                                     sequence, simd::kTileQueries) +
                        query / simd::kTileQueries;
  return sink_terms_[head * SinkTerms() + panel];
}

double& SmallGradients::AlibiTerm(const BlockPair& pair) const {
  return alibi_terms_[pair.queries.head * in_.plan.k_blocks +
                      in_.plan.sequences[pair.keys.sequence].k_block +
                      pair.keys.block];
}

void SmallGradients::Store() const {
  const auto store = [](const TensorView& out, int64_t b, int64_t h,
                        double value) {
    *reinterpret_cast<float*>(At(out, b, h, 0)) = static_cast<float>(value);
  };
  if (wants_sinks()) {
    for (int64_t h = 0; h < in_.problem.q_heads; ++h) {
      double sum = 0.0;
      for (int64_t i = 0; i < SinkTerms(); ++i) {
        sum += sink_terms_[h * SinkTerms() + i];
      }
      store(in_.args.dsinks, 0, h, sum);
    }
  }
  if (wants_alibi()) {
    const TensorView& out = in_.args.dalibi_slopes;
    const bool per_sequence = out.sizes[0] != 1;
    for (int64_t h = 0; h < in_.problem.q_heads; ++h) {
      double sum = 0.0;
      for (size_t i = 0; i < in_.plan.sequences.size(); ++i) {
        const int64_t s = static_cast<int64_t>(i);
        for (int64_t b = 0; b < in_.plan.sequences[i].keys.count(); ++b) {
          sum += AlibiTerm({{s, h, 0}, {s, 0, b}});
        }
        if (per_sequence) {
          store(out, s, h, sum);
          sum = 0.0;
        }
      }
      if (!per_sequence) store(out, 0, h, sum);
    }
  }
}

}  // namespace fa2::attention
