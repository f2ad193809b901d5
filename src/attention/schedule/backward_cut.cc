// SPDX-License-Identifier: Apache-2.0
#include "src/attention/schedule/backward_cut.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fa2::attention {
namespace {

// Wanted key blocks that one dQ partial serves: items of different splits need
// not wait for one another (AMX, 32 threads, H 16: two splits 5-15% faster than
// one).
constexpr int64_t kSplitItems = 2;
// Keys that a split is worth. Where several query heads share them, and no more
// than so many key blocks are wanted of each sequence and kv head, few workers
// share a split and hardly wait for one another: what larger blocks spare
// counts for more (AMX, H 16 with 4 kv heads, N 1024, D 64 and 128, two splits
// instead of four: one thread 9 and 17% faster, 16 threads the same).
constexpr int64_t kLeastSplit = 256;
constexpr int64_t kLeastSharedSplit = 512;
constexpr int64_t kMostForSharedSplit = 16;
// Kv heads of all sequences that are enough for so many threads, and splits
// that fewer are cut into (AMX, 16 threads, 8 heads of N 1024 and 2048: 32
// instead of 16 splits 0.91 to 1.17 times as fast, 1.04 in the middle, with
// half the workspace at N 2048).
constexpr int64_t kEnoughHeads = 16;
constexpr int64_t kWantedGroupSplits = 32;

// Time of a split's items on `workers` workers, who start one query block after
// one another and at the end wait for half an item, in pairs of one key and one
// query. A key block costs as much as some 90 keys more (AMX, D 128: 3,600
// cycles for 32 x 32 scores in blocks of 128 keys, 2,480 in blocks of 512), a
// query block as much as some 20 queries.
double SplitTime(int64_t keys, int64_t queries, const simd::BlockSizes& size,
                 int64_t workers) {
  const int64_t items = CeilDiv(keys, size.keys);
  const double busy =
      static_cast<double>(std::clamp<int64_t>(workers, 1, items));
  const double rounds =
      static_cast<double>(items) / busy + (busy > 1.0 ? 0.5 : 0.0);
  const double block_pairs =
      rounds * static_cast<double>(CeilDiv(queries, size.queries)) + busy - 1.0;
  return block_pairs *
         static_cast<double>((size.keys + 90) * (size.queries + 20));
}

// The blocks in which `workers` workers are soonest through with a split of
// `keys` keys, a multiple of `key_unit`, and `queries` queries of all heads.
simd::BlockSizes FastestBlocks(int64_t keys, int64_t queries,
                               const simd::BlockSizes& largest,
                               int64_t key_unit, int64_t query_unit,
                               int64_t workers) {
  simd::BlockSizes best;
  double least = std::numeric_limits<double>::infinity();
  simd::BlockSizes size;
  for (int64_t count = CeilDiv(keys, largest.keys); size.keys != key_unit;
       ++count) {
    size = {RoundUp(CeilDiv(keys, count), key_unit), largest.queries};
    for (;; size.queries /= 2) {
      const double time = SplitTime(keys, queries, size, workers);
      if (time < least) {
        least = time;
        best = size;
      }
      if (size.queries % (2 * query_unit) != 0 ||
          size.queries < 4 * kMinBlock) {
        break;
      }
    }
  }
  return best;
}

}  // namespace

int64_t GroupSplits(const Problem& problem, const simd::Engine& engine,
                    int64_t items) {
  const int64_t heads =
      problem.kv_heads * static_cast<int64_t>(problem.sequences.size());
  if (!engine.bitwise_block_invariant || problem.group() <= 1 || heads == 0 ||
      heads >= kEnoughHeads) {
    return 1;
  }
  return std::clamp<int64_t>(std::min(items, kWantedGroupSplits) / heads, 1,
                             std::min(problem.group(), kMaxGroupSplits));
}

void CutSequence(const Problem& problem, const simd::Engine& engine,
                 const Sequence& sequence, double pairs, int64_t group_splits,
                 int64_t wanted, int64_t workers, bool fixed_blocks,
                 BackwardSequence* s) {
  const int64_t query_unit = BlockUnit(engine.query_panel, simd::kTileQueries);
  const int64_t key_unit = BlockUnit(engine.key_panel, simd::kTileKeys);
  const simd::BlockSizes preferred =
      engine.backward_blocks(problem.head_dim, problem.value_dim);
  const int64_t nq = sequence.nq(), nk = sequence.nk();
  s->keys.rows = nk;
  s->queries.rows = nq;
  s->keys.panel = engine.key_panel;
  s->queries.panel = engine.query_grain;
  s->queries.superblock = FitBlock(preferred.queries, nq, 1, query_unit);
  const int64_t least_split =
      problem.group() > group_splits && wanted <= kMostForSharedSplit
          ? kLeastSharedSplit
          : kLeastSplit;
  s->key_splits = std::clamp<int64_t>(
      std::min(wanted / kSplitItems, nk / least_split), 1, kMaxKeySplits);
  if (engine.bitwise_block_invariant) {
    const int64_t unit = RoundUp(kMinBlock, key_unit);
    s->keys.superblock =
        RoundUp(CeilDiv(std::max<int64_t>(nk, 1), s->key_splits), unit);
    // Under a causal mask the first split sees most.
    const double of_first =
        problem.Pairs(sequence, {0, problem.q_heads}, {0, nq},
                      {0, std::min(nk, s->keys.superblock)}) /
        std::max(1.0, pairs);
    const simd::BlockSizes size = FastestBlocks(
        s->keys.superblock, nq * CeilDiv(problem.group(), group_splits),
        {preferred.keys, s->queries.superblock}, unit, query_unit,
        static_cast<int64_t>(
            std::ceil(of_first * static_cast<double>(workers))));
    s->keys.size = size.keys;
    s->queries.size = size.queries;
    // Superblocks keep the order of sums where blocks are cut by the threads.
    // What sums over heads or sequences wants these innermost: a block at a
    // time.
    if (fixed_blocks) s->queries.superblock = s->queries.size;
  } else {
    s->keys.size = FitBlock(preferred.keys, nk, wanted, key_unit);
    s->queries.size = s->queries.superblock;
    s->keys.superblock =
        s->keys.size *
        CeilDiv(CeilDiv(std::max<int64_t>(nk, 1), s->keys.size), s->key_splits);
  }
  s->key_splits = std::max<int64_t>(1, CeilDiv(nk, s->keys.superblock));
}

}  // namespace fa2::attention
