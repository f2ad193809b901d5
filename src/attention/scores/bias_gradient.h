// dbias: dS summed over the dimensions that bias broadcasts.
//
// A work item owns a block of keys, for all heads and batches that share a
// plane of dbias (the plan sees to that), so each element has one writer. dS of
// a block is collected in a staged f32 block and stored once the last head or
// batch that shares the plane has added to it. A bias that broadcasts its
// queries collects sums over queries in rows of the workspace, stored at the
// end. A bias that broadcasts its keys collects sums over keys, one array a
// split, whose items take turns, added in order at the end.
#ifndef FA2_SRC_ATTENTION_SCORES_BIAS_GRADIENT_H_
#define FA2_SRC_ATTENTION_SCORES_BIAS_GRADIENT_H_

#include <cstdint>

#include "src/attention/call/problem.h"
#include "src/attention/scores/block_scores.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/rows.h"
#include "src/simd/rowwise/staging.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

inline bool SharesBatch(const TensorView& dbias) {
  return dbias.given() && dbias.sizes[0] == 1;
}
inline bool SharesHeads(const TensorView& dbias) {
  return dbias.given() && dbias.sizes[1] == 1;
}
inline bool SharesQueries(const TensorView& dbias, const Problem& problem) {
  return dbias.given() && dbias.sizes[2] == 1 && problem.q.sizes[2] != 1;
}
inline bool SharesKeys(const TensorView& dbias, const Problem& problem) {
  return dbias.given() && dbias.sizes[3] == 1 && problem.k.sizes[2] != 1;
}

// The part of dbias that is collected block by block: all of it or, with
// shared keys, none.
inline TensorView BlockBiasGradient(const TensorView& dbias,
                                    const Problem& problem) {
  return SharesKeys(dbias, problem) ? TensorView() : dbias;
}

// [plane][Nk] sums over queries, when dbias broadcasts them.
struct BiasGradientRows {
  BiasGradientRows(const TensorView& dbias, const Problem& problem,
                   const simd::Engine& engine, Carver* carver);
  std::byte* data = nullptr;
  size_t bytes = 0;

  void Store(const TensorView& dbias, bool add,
             const simd::RowKernels& kernels) const;
};

// One worker's part.
class BiasGradient {
 public:
  BiasGradient(const TensorView& dbias, bool add, const Problem& problem,
               const simd::Engine& engine, const simd::StagingKernels& staging,
               const simd::RowKernels& kernels, const simd::BlockSizes& largest,
               const BiasGradientRows& rows, Carver* carver);

  bool wanted() const { return dbias_.given(); }

  // Where the engine shall put dS of the next block, then: it did, or the
  // block is hidden.
  void* Target() const { return empty_ ? sum_ : term_; }
  void Collect(const simd::StagedShape& shape, bool hidden);

  // Or where it shall put them itself, if the block alone adds to them.
  simd::ScoreStream Stream(const BlockPlace& place) const;
  bool can_stream() const { return engine_.streams_scores && rows_.bytes == 0; }

  // All that share the plane have been collected.
  void Finish(const BlockPlace& place, const simd::StagedShape& shape);

 private:
  simd::ScoreMatrix Elements(const BlockPlace& place) const;

  TensorView dbias_;
  bool add_;
  const Problem& problem_;
  const simd::Engine& engine_;
  const simd::StagingKernels& staging_;
  const simd::RowKernels& kernels_;
  const BiasGradientRows& rows_;
  std::byte* sum_ = nullptr;
  std::byte* term_ = nullptr;
  bool empty_ = true;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCORES_BIAS_GRADIENT_H_
