// SPDX-License-Identifier: Apache-2.0

// How far ALiBi lets queries see. Scores fall with the distance, so that far
// enough from a query every P is less than the exponentials keep: tiles that
// hold no other P are left out, as masked ones are. With slopes of 2^-1 to 2^-8
// most heads then see a window that the length of the sequence does not widen.
//
// Told from norms: no score exceeds |scale| |q| |k| - slope * distance, and no
// logsumexp is below the score of the nearest key.
#ifndef FA2_SRC_ATTENTION_SCORES_ALIBI_REACH_H_
#define FA2_SRC_ATTENTION_SCORES_ALIBI_REACH_H_

#include <cstdint>

#include "src/attention/call/mask.h"
#include "src/attention/call/problem.h"
#include "src/attention/schedule/blocks.h"
#include "src/simd/rowwise/rows.h"
#include "src/threading/scratch_layout.h"

namespace fa2::attention {

class AlibiReach {
 public:
  // Takes 8 bytes for each 32 queries and 4 for each 16 keys of a head, where
  // there are slopes, no bias, which might raise any score, and no block mask,
  // which might hide the nearest key.
  AlibiReach(const Problem& problem, const simd::RowKernels& kernels,
             threading::ScratchLayout* layout);

  // What is known of rows, once for each block of them, before a tile of the
  // block is looked at. Blocks begin at a multiple of the tile size; their rows
  // are `k` and `q`.
  void SeeKeys(const BlockRows& keys, const simd::Rows& k) const;
  void SeeQueries(const BlockRows& queries, const simd::Rows& q) const;

  // What the logsumexp of the queries is not below: the score of the nearest
  // key each sees, where that is the one at its own position, else what it must
  // be by norms (of keys that have been seen). `q`: rows of the queries, `k`:
  // of OwnKeys(), which may be empty.
  void BoundByNearestKey(const BlockRows& queries, const simd::Rows& q,
                         const simd::Rows& k) const;
  Interval OwnKeys(const BlockRows& queries) const;

  // The logsumexp itself. `lse` and `delta`: float or double as the problem's
  // accumulator. Where one of them is not finite there is something that P = 0
  // would not take away.
  void BoundByStatistics(const BlockRows& queries, const void* lse,
                         const void* delta) const;

  // Whether a tile of the block pair may be out of reach.
  bool MayHide(const PairRows& pair) const;
  // Whether the tile at query `q` and key `k` is.
  bool Hides(int64_t sequence, int64_t head, int64_t q, int64_t k) const;

 private:
  // Whether the slope hides anything of a sequence for small scores.
  bool Steep(int64_t sequence, int64_t head) const;
  // What no score exceeds, and none of them its negative, but for ALiBi.
  float Greatest(float query_norm, float key_norm) const;
  // Greatest norm of at most 32 rows; NaN if one is not finite.
  float Norm(const simd::Rows& rows) const;
  // That of each `size` rows, at most 32.
  void Norms(const simd::Rows& rows, int64_t size, float* norms) const;
  // Scores of row i of `q` and row i of `k` without ALiBi, of at most 32 rows.
  void PairScores(const simd::Rows& q, const simd::Rows& k,
                  float* scores) const;
  // Calls take(i) for the queries of the panel at `q` that see a key.
  template <class Take>
  void ForSeeing(int64_t sequence, int64_t q, const Take& take) const;
  template <typename T>
  void BoundBy(const BlockRows& queries, const T* lse, const T* delta) const;

  // Index of 32 queries of a sequence and head, and of 16 keys.
  int64_t QueryPanel(int64_t sequence, int64_t head, int64_t q) const;
  int64_t KeyTile(int64_t sequence, int64_t kv_head, int64_t k) const;
  // Position of query 0 among the keys.
  int64_t Diagonal(int64_t sequence) const {
    const Sequence& s = problem_.sequences[sequence];
    return s.nk() - s.nq();
  }

  const Problem& problem_;
  const simd::RowKernels& kernels_;
  const float range_;         // P is kept while its logarithm is above -range_
  bool wanted_ = false;       // a slope is steep
  int64_t query_panels_ = 0;  // of a head, of all sequences
  int64_t key_tiles_ = 0;
  float* query_norm_ = nullptr;  // [head][panel]
  float* floor_ = nullptr;       // of logsumexp
  float* key_norm_ = nullptr;    // [kv head][tile]
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCORES_ALIBI_REACH_H_
