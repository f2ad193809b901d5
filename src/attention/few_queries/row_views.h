// SPDX-License-Identifier: Apache-2.0

// How the rows of queries of an item see a run of its keys.
#ifndef FA2_SRC_ATTENTION_FEW_QUERIES_ROW_VIEWS_H_
#define FA2_SRC_ATTENTION_FEW_QUERIES_ROW_VIEWS_H_

#include <cstdint>

#include "src/attention/call/problem.h"
#include "src/attention/few_queries/items.h"
#include "src/simd/direct/direct.h"
#include "src/simd/rowwise/staging.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

class RowViews {
 public:
  RowViews(const Problem& problem, const simd::StagingKernels& staging,
           int64_t most_rows, int64_t most_keys,
           threading::ScratchLayout* layout);

  // What the scores of an item's rows against `keys`, at most most_keys of
  // the sequence, are made of, with `products` to be computed. No views where
  // no row sees any of the keys.
  simd::DirectScores Scores(const FewQueriesItem& item, Interval keys,
                            simd::DirectRows products);

 private:
  // The rows' views, or nullptr.
  const simd::DirectView* Views(const FewQueriesItem& item, Interval keys);
  // Whether all rows see all of the keys and have no options.
  bool AreSame(const Sequence& sequence, Interval keys) const;
  // Whether an array of bias shows any row a key.
  bool BiasShows(const FewQueriesItem& item, Interval keys) const;

  const Problem& problem_;
  const simd::StagingKernels& staging_;
  const int64_t most_keys_;
  simd::DirectView* views_;
  // Views that are the same are made once: so many rows of so many keys.
  int64_t same_rows_ = 0, same_keys_ = 0;
  uint8_t* keep_ = nullptr;  // [row][most_keys_]
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_FEW_QUERIES_ROW_VIEWS_H_
