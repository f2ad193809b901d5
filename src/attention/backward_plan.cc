#include "src/attention/backward_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/attention/workers.h"

namespace fa2::attention {
namespace {

// What each of the wanted items is worth at least: some 16 us of an AMX core's
// time, 100 us of another's.
constexpr double kLeastOperations = 16e6;
// The threads that blocks are cut for where the number of them must not matter.
constexpr int kUsualThreads = 16;
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
// Packed queries of a group of heads, in bytes, that a core's share of L3 does
// not hold beside what else it works on.
constexpr size_t kFarQueries = 8 << 20;

// Time of a split's items on `workers` workers, who start one query block after
// one another and at the end wait for half an item, in cells of one key and one
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
  const double cells =
      rounds * static_cast<double>(CeilDiv(queries, size.queries)) + busy - 1.0;
  return cells * static_cast<double>((size.keys + 90) * (size.queries + 20));
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

// Cuts one sequence of `pairs` visible pairs, which is to get `wanted` key
// blocks; `workers` is its share of them.
void CutSequence(const Problem& problem, const simd::Engine& engine,
                 const Sequence& sequence, double pairs, int64_t wanted,
                 int64_t workers, bool fixed_blocks, BackwardSequence* s) {
  const int64_t query_unit = BlockUnit(engine.query_panel, simd::kTileQueries);
  const int64_t key_unit = BlockUnit(engine.key_panel, simd::kTileKeys);
  const simd::BlockSizes preferred =
      engine.backward_blocks(problem.head_dim, problem.value_dim);
  const int64_t nq = sequence.nq(), nk = sequence.nk();
  s->keys.rows = nk;
  s->queries.rows = nq;
  s->keys.panel = engine.key_panel;
  s->queries.panel = engine.query_panel;
  s->queries.run = FitBlock(preferred.queries, nq, 1, query_unit);
  const int64_t least_split =
      problem.group() > 1 && wanted <= kMostForSharedSplit ? kLeastSharedSplit
                                                           : kLeastSplit;
  s->splits = std::clamp<int64_t>(
      std::min(wanted / kSplitItems, nk / least_split), 1, kMaxSplits);
  if (engine.blocks_join) {
    const int64_t unit = RoundUp(kMinBlock, key_unit);
    s->keys.run = RoundUp(CeilDiv(std::max<int64_t>(nk, 1), s->splits), unit);
    // Under a causal mask the first split sees most.
    const double of_first =
        sequence.mask.Pairs({0, nq}, {0, s->keys.run}) / std::max(1.0, pairs);
    const simd::BlockSizes size =
        FastestBlocks(s->keys.run, nq * problem.group(),
                      {preferred.keys, s->queries.run}, unit, query_unit,
                      static_cast<int64_t>(
                          std::ceil(of_first * static_cast<double>(workers))));
    s->keys.size = size.keys;
    s->queries.size = size.queries;
    // Runs keep the order of sums where blocks are cut by the threads. What
    // sums over heads or sequences wants these innermost: a block at a time.
    if (fixed_blocks) s->queries.run = s->queries.size;
  } else {
    s->keys.size = FitBlock(preferred.keys, nk, wanted, key_unit);
    s->queries.size = s->queries.run;
    s->keys.run =
        s->keys.size *
        CeilDiv(CeilDiv(std::max<int64_t>(nk, 1), s->keys.size), s->splits);
  }
  s->splits = std::max<int64_t>(1, CeilDiv(nk, s->keys.run));
}

// Where the sequences lie in arrays of one head of all of them.
void PlaceSequences(BackwardPlan* plan) {
  for (BackwardSequence& s : plan->sequences) {
    s.q_row = plan->q_rows;
    s.q_block = plan->q_blocks;
    s.k_block = plan->k_blocks;
    s.dq_block = plan->dq_blocks;
    plan->q_rows += s.queries.padded();
    plan->q_blocks += s.queries.count();
    plan->k_blocks += s.keys.count();
    plan->dq_blocks += s.splits * s.queries.count();
    plan->blocks.keys = std::max(plan->blocks.keys, s.keys.size);
    plan->blocks.queries = std::max(plan->blocks.queries, s.queries.size);
    const size_t index = static_cast<size_t>(&s - plan->sequences.data());
    ListBlocks(s.queries, index, &plan->query_blocks);
  }
}

// And in those of a wave, one that begins with the first head.
void PlaceInWave(const Wave& wave, BackwardPlan* plan) {
  int64_t q_rows = 0, k_rows = 0, dq_rows = 0;
  for (int64_t i = wave.sequence_begin; i < wave.sequence_end; ++i) {
    BackwardSequence& s = plan->sequences[i];
    s.wave_q_row = q_rows;
    s.wave_k_row = k_rows;
    s.wave_dq_row = dq_rows;
    q_rows += s.queries.padded();
    k_rows += s.keys.padded();
    dq_rows += s.splits * s.queries.padded();
  }
  plan->wave_q_rows = std::max(plan->wave_q_rows, q_rows);
  plan->wave_k_rows = std::max(plan->wave_k_rows, k_rows);
  plan->wave_dq_rows = std::max(plan->wave_dq_rows, dq_rows);
}

// Adds the chains of a wave. Returns their items.
int64_t ListChains(const Problem& problem, const BackwardUse& use, Wave* wave,
                   BackwardPlan* plan) {
  wave->begin = static_cast<int64_t>(plan->chains.size());
  int64_t items = 0;
  const int64_t item_heads = use.share_heads ? problem.kv_heads : 1;
  const int64_t item_sequences =
      use.share_batch ? static_cast<int64_t>(problem.sequences.size()) : 1;
  for (int64_t i = wave->sequence_begin; i < wave->sequence_end;
       i += item_sequences) {
    const BackwardSequence& s = plan->sequences[i];
    for (int64_t split = 0; split < s.splits; ++split) {
      BackwardChain chain;
      chain.split = static_cast<int32_t>(split);
      chain.sequence_begin = static_cast<int32_t>(i);
      chain.sequence_end = static_cast<int32_t>(i + item_sequences);
      chain.cost = problem.sequences[i].mask.Pairs({0, s.queries.rows},
                                                   s.keys.Run(split));
      for (int64_t head = wave->head_begin; head < wave->head_end;
           head += item_heads) {
        chain.head_begin = static_cast<int32_t>(head);
        chain.head_end = static_cast<int32_t>(head + item_heads);
        chain.rank = static_cast<int32_t>(plan->chains.size());
        plan->chains.push_back(chain);
        items += s.keys.RunBlocks(split).size();
      }
    }
  }
  wave->end = static_cast<int64_t>(plan->chains.size());
  // std::sort, unlike stable_sort, needs no memory; the ranks make it stable.
  std::sort(plan->chains.begin() + wave->begin, plan->chains.end(),
            [](const BackwardChain& a, const BackwardChain& b) {
              return a.cost != b.cost ? a.cost > b.cost : a.rank < b.rank;
            });
  return items;
}

// Whether one worker is to go by queries: a run of them in several heads shares
// what it reads of a key block, where all queries of these heads would come
// from memory for each key block (bf16 dots on Zen 4: with 8 to 32 MiB of them
// 1 to 4% faster, with 4 MiB, or one head, 0 to 1% slower).
bool GoesByQueries(const Problem& problem, const simd::Engine& engine,
                   int64_t rows) {
  if (problem.group() == 1) return false;
  size_t bytes = 0;
  for (const int64_t depth : {problem.head_dim, problem.value_dim}) {
    bytes += engine.packed_bytes(simd::Role::kScoreRight, rows, depth) +
             engine.packed_bytes(simd::Role::kGradRight, rows, depth);
  }
  return bytes * static_cast<size_t>(problem.group()) >= kFarQueries;
}

}  // namespace

void PlanBackward(const Problem& problem, const simd::Engine& engine,
                  const BackwardUse& use, BackwardPlan* plan) {
  plan->sequences.clear();
  plan->query_blocks.clear();
  plan->chains.clear();
  plan->waves.list.clear();
  plan->waves.alone = false;
  plan->wave_heads = plan->wave_chains = plan->wave_items = 0;
  plan->wave_q_rows = plan->wave_k_rows = plan->wave_dq_rows = 0;
  plan->workers = 1;
  plan->q_rows = 0;
  plan->q_blocks = plan->k_blocks = plan->dq_blocks = 0;
  plan->blocks = {0, 0};
  const int64_t sequence_count = static_cast<int64_t>(problem.sequences.size());

  // Each sequence gets key blocks, and workers, by its share of the work.
  const double total = problem.pairs();
  const int64_t heads = use.share_heads ? 1 : problem.kv_heads;
  const int64_t owners = (use.share_batch ? 1 : sequence_count) * heads;
  const double operations = 10.0 * total *
                            static_cast<double>(problem.q_heads) *
                            static_cast<double>(problem.head_dim);
  const double items = std::clamp(operations / kLeastOperations, 1.0,
                                  static_cast<double>(kWantedItems));
  const int threads = use.fixed_blocks ? kUsualThreads : use.threads;
  plan->shared_keys = owners != sequence_count * problem.kv_heads;
  for (const Sequence& s : problem.sequences) {
    const double pairs = s.mask.Pairs();
    // With shared owners every sequence must be cut alike.
    const double share = use.share_batch || total == 0.0
                             ? 1.0 / (use.share_batch ? 1 : sequence_count)
                             : pairs / total;
    const auto of_head = [&](double all) {
      return std::max<int64_t>(
          1,
          std::llround(std::ceil(
              all * share / static_cast<double>(std::max<int64_t>(heads, 1)))));
    };
    const int64_t wanted = of_head(items);
    const int64_t workers =
        of_head(std::min(items, static_cast<double>(threads)));
    BackwardSequence cut;
    CutSequence(problem, engine, s, pairs, wanted, workers, use.fixed_blocks,
                &cut);
    plan->sequences.push_back(cut);
  }
  PlaceSequences(plan);
  if (sequence_count == 0) return;

  const bool shared = use.share_heads || use.share_batch;
  plan->waves.alone =
      use.threads > 1 && !shared && TakeHeadsAlone(problem, total, use.threads);
  double least =
      LeastWave(problem, operations, plan->waves.threads(use.threads),
                kBackwardWaveItems, plan->k_blocks);
  if (shared) least = std::max(least, 1.0);
  if (use.share_heads) least = static_cast<double>(problem.kv_heads);
  CutWaves(problem, total, least, &plan->waves.list);
  int64_t steps = 0;  // of items that do not wait for one another
  for (Wave& wave : plan->waves.list) {
    if (wave.head_begin == 0) PlaceInWave(wave, plan);
    plan->wave_items =
        std::max(plan->wave_items, ListChains(problem, use, &wave, plan));
    plan->wave_heads = std::max(plan->wave_heads, wave.heads());
    plan->wave_chains = std::max(plan->wave_chains, wave.end - wave.begin);
    steps = std::max(
        steps, plan->QueryBlocks(wave).size() * wave.heads() * problem.group());
  }
  plan->by_queries = !shared && plan->waves.threads(use.threads) == 1 &&
                     GoesByQueries(problem, engine, plan->wave_q_rows);
  plan->shared_keys |= plan->by_queries;
  SortAlone(&plan->waves);
  steps = plan->waves.alone
              ? static_cast<int64_t>(plan->waves.list.size())
              : std::max({plan->wave_items, plan->wave_chains, steps});
  plan->workers = UsefulWorkers(use.threads, operations, steps);
}

}  // namespace fa2::attention
