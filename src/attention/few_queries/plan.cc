// SPDX-License-Identifier: Apache-2.0
#include "src/attention/few_queries/plan.h"

#include <algorithm>

#include "src/attention/schedule/workers.h"
#include "src/simd/direct/direct.h"

namespace fa2::attention {
namespace {

// Keys of a part at least: what one costs beside its products, a row of O and
// its statistics to be merged, is then little.
constexpr int64_t kLeastPart = 256;

// Operations that take as long as it takes to read a byte of K or V: a core
// reads some 10 to 20 GB/s from memory and does 0.2e12 operations a second.
constexpr double kOperationsOfByte = 16.0;

// Rows of queries of an item at most, which bounds a worker's scratch: 128 rows
// of 256 floats are 128 KiB.
constexpr int64_t kMostRows = 128;

// Pairs of a row above Engine::direct_rows and a key up to which packing still
// costs more: with bf16 on AMX 10 queries of 10 keys took a third of the time,
// 16 of 16 as long.
constexpr int64_t kFewPairs = 200;

// Keys from which Engine::direct_long_rows holds: packing 197 keys for 16 rows
// took as long as not to.
constexpr int64_t kManyKeys = 256;

int64_t MostQueries(const Problem& problem) {
  int64_t queries = 0;
  for (const Sequence& sequence : problem.sequences) {
    queries = std::max(queries, sequence.nq());
  }
  return queries;
}

}  // namespace

bool HasFewQueries(const Problem& problem, const simd::Engine& engine) {
  if (problem.blocks.given()) return false;
  const int64_t queries = MostQueries(problem);
  const int64_t rows = queries * problem.group();
  if (rows > kMostRows) return false;
  if (queries <= engine.direct_queries || rows <= engine.direct_rows) {
    return true;
  }
  const int64_t keys = problem.most_keys();
  return (rows - engine.direct_rows) * keys <= kFewPairs ||
         (rows <= engine.direct_long_rows && keys >= kManyKeys);
}

void PlanFewQueries(const Problem& problem, bool all_keys, int threads,
                    FewQueriesPlan* plan) {
  plan->most_rows = MostQueries(problem) * problem.group();
  plan->parts.clear();
  plan->merged.clear();
  plan->partials = 0;
  plan->even = true;
  const int64_t heads = std::max<int64_t>(
      1, problem.kv_heads * static_cast<int64_t>(problem.sequences.size()));
  const int64_t wanted = CeilDiv(kWantedItems, heads);
  int64_t keys_read = 0;
  for (size_t i = 0; i < problem.sequences.size(); ++i) {
    const Mask& mask = problem.sequences[i].mask;
    if (mask.nq() == 0 && !all_keys) continue;
    const Interval keys =
        all_keys ? Interval{0, mask.nk()} : mask.KeysOf({0, mask.nq()});
    keys_read += keys.size();
    const int64_t size =
        std::max(kLeastPart,
                 RoundUp(CeilDiv(keys.size(), wanted), simd::kDirectKeyBlock));
    // At least one, which finishes the rows.
    const int64_t count = std::max<int64_t>(1, CeilDiv(keys.size(), size));
    const int64_t first = static_cast<int64_t>(plan->parts.size());
    for (int64_t n = 0; n < count; ++n) {
      KeyPart part;
      part.sequence = static_cast<int64_t>(i);
      part.keys = {keys.begin + n * size,
                   std::min(keys.begin + (n + 1) * size, keys.end)};
      if (count > 1) part.partial = plan->partials++;
      part.merge = static_cast<int64_t>(plan->merged.size());
      plan->parts.push_back(part);
      plan->even &=
          count == 1 && keys.size() == plan->parts.front().keys.size();
    }
    if (count > 1) plan->merged.push_back({first, first + count});
  }
  const double elements =
      static_cast<double>(keys_read * problem.kv_heads) *
      static_cast<double>(problem.head_dim + problem.value_dim);
  const double operations =
      elements *
      (2.0 * static_cast<double>(plan->most_rows) +
       kOperationsOfByte * static_cast<double>(SizeOf(problem.k.dtype)));
  plan->workers = UsefulWorkers(
      threads, operations,
      static_cast<int64_t>(plan->parts.size()) * problem.kv_heads);
}

}  // namespace fa2::attention
