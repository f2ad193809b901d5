// SPDX-License-Identifier: Apache-2.0
#include "src/attention/few_queries/row_views.h"

#include <algorithm>
#include <new>

#include "src/attention/scores/bias_tiles.h"

namespace fa2::attention {

RowViews::RowViews(const Problem& problem, const simd::StagingKernels& staging,
                   int64_t most_rows, int64_t most_keys,
                   threading::ScratchLayout* layout)
    : problem_(problem), staging_(staging), most_keys_(most_keys) {
  views_ = layout->Take<simd::DirectView>(static_cast<size_t>(most_rows));
  if (problem.options.dropout_p > 0.0) {
    keep_ = layout->Take<uint8_t>(static_cast<size_t>(most_rows * most_keys));
  }
}

bool RowViews::BiasShows(const FewQueriesItem& item, Interval keys) const {
  const Sequence& s = problem_.sequences[item.part->sequence];
  const ConstTensorView& bias = problem_.options.bias;
  const int64_t heads = bias.sizes[1] == 1 ? 1 : problem_.group();
  for (int64_t g = 0; g < heads; ++g) {
    const simd::ScoreMatrix matrix = MatrixOf(
        bias, s.batch, item.kv_head * problem_.group() + g, 0, keys.begin);
    if (AnyVisible(matrix, {s.nq(), keys.size(), s.nq(), keys.size(), 1})) {
      return true;
    }
  }
  return false;
}

simd::DirectScores RowViews::Scores(const FewQueriesItem& item, Interval keys,
                                    simd::DirectRows products) {
  simd::DirectScores scores;
  products.rows = RowsOf(problem_, item);
  scores.products = products;
  scores.keys = keys.size();
  scores.views = Views(item, keys);
  scores.scale = problem_.scale;
  scores.softcap = problem_.options.softcap;
  return scores;
}

bool RowViews::AreSame(const Sequence& sequence, Interval keys) const {
  const AttentionOptions& options = problem_.options;
  if (options.bias.given() || options.alibi_slopes.given() ||
      keep_ != nullptr || sequence.nq() == 0) {
    return false;
  }
  const auto sees_all = [&](int64_t query) {
    const Interval seen = sequence.mask.Keys(query);
    return seen.begin <= keys.begin && keys.end <= seen.end;
  };
  return sees_all(0) && sees_all(sequence.nq() - 1);
}

const simd::DirectView* RowViews::Views(const FewQueriesItem& item,
                                        Interval keys) {
  const int64_t sequence = item.part->sequence;
  const Sequence& s = problem_.sequences[sequence];
  const AttentionOptions& options = problem_.options;
  const bool same = AreSame(s, keys);
  const int64_t rows = s.nq() * problem_.group();
  if (same && same_rows_ == rows && same_keys_ == keys.size()) return views_;
  same_rows_ = same ? rows : 0;
  same_keys_ = keys.size();
  bool any = false;
  for (int64_t g = 0; g < problem_.group(); ++g) {
    const int64_t head = item.kv_head * problem_.group() + g;
    for (int64_t i = 0; i < s.nq(); ++i) {
      simd::DirectView view;
      const Interval seen = s.mask.Keys(i);
      view.keys.begin =
          std::clamp(seen.begin, keys.begin, keys.end) - keys.begin;
      view.keys.end = std::clamp(seen.end, keys.begin, keys.end) - keys.begin;
      any |= !view.keys.empty();
      if (options.bias.given()) {
        view.bias = MatrixOf(options.bias, s.batch, head, i, keys.begin);
      }
      if (options.alibi_slopes.given()) {
        view.alibi_slope = AlibiSlope(problem_, sequence, head);
        view.position = static_cast<double>(i + s.nk() - s.nq() - keys.begin);
      }
      new (views_ + g * s.nq() + i) simd::DirectView(view);
    }
  }
  if (!any || (options.bias.given() && !BiasShows(item, keys))) return nullptr;
  if (keep_ != nullptr) {
    for (int64_t g = 0; g < problem_.group(); ++g) {
      const int64_t head = item.kv_head * problem_.group() + g;
      for (int64_t i = 0; i < s.nq(); ++i) {
        const int64_t row = g * s.nq() + i;
        // max_nq may be any that the caller gives: modulo 2^64, as offsets are.
        const uint64_t query =
            static_cast<uint64_t>(sequence * problem_.q_heads + head) *
                static_cast<uint64_t>(problem_.max_nq) +
            static_cast<uint64_t>(i);
        uint8_t* const keep = keep_ + row * most_keys_;
        staging_.keep_mask(options.dropout_p, options.philox_seed,
                           options.philox_offset +
                               query * static_cast<uint64_t>(problem_.max_nk) +
                               static_cast<uint64_t>(keys.begin),
                           keys.size(), keep);
        views_[row].keep = keep;
      }
    }
  }
  return views_;
}

}  // namespace fa2::attention
