// SPDX-License-Identifier: Apache-2.0

// dbias: dS summed over the dimensions that bias broadcasts.
//
// A work item owns a block of keys, for all heads and batches that share a
// plane of dbias (the plan sees to that), so each element has one writer. dS
// reaches dbias on one of five routes:
//
//   streamed     the engine writes dS of a block pair to dbias itself, where no
//                other pair adds to the same elements
//   elements     dS is collected in a staged block, which is stored once the
//                last head or batch that shares the plane has added to it
//   group sums   of a bias that sequences share, where a head is one block
//                pair: collected in a block for each head of a run of
//                sequences, in whose order one worker takes them; the blocks
//                are added in order at the end
//   query sums   of a bias that broadcasts its queries: collected as above,
//                then summed over queries in rows of the workspace, stored at
//                the end
//   key sums     of a bias that broadcasts its keys: summed over keys, one
//                array a key split, whose items are ordered by the dq
//                semaphore; the arrays are added in order at the end
#ifndef FA2_SRC_ATTENTION_BACKWARD_BIAS_GRADIENT_H_
#define FA2_SRC_ATTENTION_BACKWARD_BIAS_GRADIENT_H_

#include <cstddef>
#include <cstdint>

#include "fa2/attention.h"
#include "src/attention/backward/dq_semaphore.h"
#include "src/attention/call/pass_call.h"
#include "src/attention/schedule/backward_plan.h"
#include "src/attention/schedule/blocks.h"
#include "src/simd/engine.h"
#include "src/threading/scratch_layout.h"
#include "src/threading/team.h"

namespace fa2::attention {

using BackwardInputs = PassInputs<AttentionBackwardArgs, BackwardPlan>;

// What dbias asks of the plan.
struct BiasGradientUse {
  bool shares_batch = false;  // sums over it
  bool shares_heads = false;
  bool has_elements = false;  // one for each query and key
  bool sums_blocks = false;   // some are sums over a block's pairs
};
BiasGradientUse UseOfBiasGradient(const TensorView& dbias,
                                  const Problem& problem,
                                  const simd::Engine& engine);

// Sums over queries or keys in the workspace, of the whole call.
class BiasGradientSums {
 public:
  enum class Route { kNone, kElements, kGroupSums, kQuerySums, kKeySums };

  BiasGradientSums(const BackwardInputs& inputs,
                   threading::ScratchLayout* layout);

  Route route() const { return route_; }
  void Clear() const;
  // The sum of a bias group, a staged block.
  std::byte* GroupSum(int64_t group) const;
  // Sums over the queries of a block of keys, and over the keys of a block of
  // queries.
  std::byte* QuerySums(int64_t batch, int64_t head, int64_t key) const;
  std::byte* KeySums(const BlockRows& queries, int64_t key_split) const;
  // To dbias, when all has been added.
  void Store(threading::Team& team) const;

 private:
  void StoreGroupSums(threading::Team& team) const;
  void StoreQuerySums() const;
  template <typename T>
  void StoreKeySums() const;

  const BackwardInputs& in_;
  Route route_ = Route::kNone;
  size_t bytes_ = 0;
  // [bias group][block], [plane of dbias][key], or [key split][head][row of all
  // sequences].
  std::byte* sums_ = nullptr;
};

// One worker's part.
class BiasGradient {
 public:
  BiasGradient(const BackwardInputs& inputs, const BiasGradientSums& sums,
               threading::ScratchLayout* layout);

  // Whether End adds to what items of other keys add to: the dq semaphore must
  // not be released before.
  bool needs_semaphore() const {
    return sums_.route() == BiasGradientSums::Route::kKeySums;
  }

  // Before the engine computes a pair of `task` that is visible: tells `block`
  // where dS goes.
  void Begin(const PairRows& pair, const KeySplitTask& task,
             simd::BackwardBlock* block);
  // After it has, or for a pair that is not visible: takes dS to where it
  // belongs. Releases the semaphore, or skips it, as early as may be.
  void End(const PairRows& pair, const KeySplitTask& task, int64_t key_split,
           bool visible, DqSemaphore* semaphore);

 private:
  // Whether the pair is the only one, and the last one, of its task that adds
  // to its elements.
  bool IsAlone(const KeySplitTask& task) const;
  bool IsLast(const PairRows& pair, const KeySplitTask& task) const;
  simd::ScoreMatrix Elements(const PairRows& pair) const;
  void StoreCollected(const PairRows& pair, const simd::StagedShape& shape);

  const BackwardInputs& in_;
  const BiasGradientSums& sums_;
  bool streamed_ = false;  // the pair that has begun
  bool empty_ = true;      // nothing is collected
  std::byte* collected_ = nullptr;
  std::byte* ds_ = nullptr;  // of one pair
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_BACKWARD_BIAS_GRADIENT_H_
