// SPDX-License-Identifier: Apache-2.0
#include "src/attention/schedule/keys_as_they_lie.h"

#include <algorithm>

namespace fa2::attention {
namespace {

// The most rows of queries of a head of keys. Reading rows once from wherever
// they are takes less than copying them (forward, f32, 32 to 64 queries: 0.86
// to 0.96 of the time; 128 to 256 of two and more panels: the same).
constexpr int64_t kMostQueries = 64;
// The same where K alone is read so, again for each 32 queries (AMX, bf16, 32
// to 128 queries: 0.91 to 0.98 of the time). Rows far apart would share sets of
// L1.
constexpr int64_t kMostQueriesOfLyingK = 128;

// Whether packed rows of K or V would be copies.
bool AsPacked(const ConstTensorView& view, const simd::Engine& engine) {
  return view.dtype == engine.accumulator && HasContiguousRows(view) &&
         view.strides[2] > 0;
}

}  // namespace

bool TakeKAsItLies(const Problem& problem, const simd::Engine& engine) {
  const ConstTensorView& k = problem.k;
  if (engine.lying_depth == 0 || k.dtype != DType::kBF16 ||
      problem.head_dim == 0 || problem.head_dim % engine.lying_depth != 0 ||
      !HasContiguousRows(k) || k.strides[2] != problem.head_dim ||
      problem.most_queries() > kMostQueriesOfLyingK) {
    return false;
  }
  return std::all_of(
      problem.sequences.begin(), problem.sequences.end(),
      [&](const Sequence& s) { return s.nk() % engine.key_panel == 0; });
}

bool TakeKeysAsTheyLie(const Problem& problem, const simd::Engine& engine) {
  return engine.rows_as_they_lie && AsPacked(problem.k, engine) &&
         AsPacked(problem.v, engine) && problem.most_queries() <= kMostQueries;
}

}  // namespace fa2::attention
