// SPDX-License-Identifier: Apache-2.0
#include "src/attention/schedule/keys_as_they_lie.h"

namespace fa2::attention {
namespace {

// The most rows of queries of a head of keys. Reading rows once from wherever
// they are takes less than copying them (forward, f32, 32 to 64 queries: 0.86
// to 0.96 of the time; 128 to 256 of two and more panels: the same).
constexpr int64_t kMostQueries = 64;

// Whether packed rows of K or V would be copies.
bool AsPacked(const ConstTensorView& view, const simd::Engine& engine) {
  return view.dtype == engine.accumulator && HasContiguousRows(view) &&
         view.strides[2] > 0;
}

}  // namespace

bool TakeKeysAsTheyLie(const Problem& problem, const simd::Engine& engine) {
  return engine.rows_as_they_lie && AsPacked(problem.k, engine) &&
         AsPacked(problem.v, engine) &&
         problem.most_queries() * problem.group() <= kMostQueries;
}

}  // namespace fa2::attention
