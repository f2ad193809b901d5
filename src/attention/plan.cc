#include "src/attention/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fa2::attention {
namespace {

// Key blocks of all heads that a plan aims at, as many as 64 cores can take.
constexpr int64_t kWantedItems = 64;
// And what each of them is worth at least: some 16 us of an AMX core's time,
// 100 us of another's.
constexpr double kLeastOperations = 16e6;
// The threads that blocks are cut for where the number of them must not matter.
constexpr int kUsualThreads = 16;
// Wanted key blocks that one dQ partial serves: items of different splits need
// not wait for one another (AMX, 32 threads, H 16: two splits 5-15% faster than
// one).
constexpr int64_t kSplitItems = 2;
// Keys that a split is worth.
constexpr int64_t kLeastSplit = 256;
// A block smaller than this does not amortise the calls around it.
constexpr int64_t kMinBlock = 64;
// The most queries of an item of the forward where several threads share them
// out. For one alone K and V come from L3 less often if it takes more (AMX, N
// 4096: D 64 844 -> 861, D 128 1,033 -> 1,071, D 256 with half as many 1,181 ->
// 1,268 GFLOP/s); on 16 threads, two of which share an L2, more gain nothing.
constexpr int64_t kSharedQueries = 256;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return CeilDiv(value, multiple) * multiple;
}

// Block starts must suit both panels and tiles.
int64_t BlockUnit(int64_t panel, int64_t tile) {
  return panel > tile ? RoundUp(panel, tile) : RoundUp(tile, panel);
}

// The block size for `rows` rows in at least `ranges` ranges.
int64_t FitBlock(int64_t preferred, int64_t rows, int64_t ranges,
                 int64_t unit) {
  const int64_t share =
      RoundUp(CeilDiv(std::max<int64_t>(rows, 1), ranges), unit);
  const int64_t least = RoundUp(std::min(kMinBlock, preferred), unit);
  return std::max(unit,
                  std::min(RoundUp(preferred, unit), std::max(share, least)));
}

void ListBlocks(const Blocks& blocks, size_t sequence,
                std::vector<BlockIndex>* list) {
  for (int64_t b = 0; b < blocks.count(); ++b) {
    list->push_back({static_cast<int32_t>(sequence), static_cast<int32_t>(b)});
  }
}

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

// How many of `threads` a call of so many operations is soonest through with,
// if no step has more than `items` items. One more takes off time / n^2 and
// costs a microsecond to wake and to wait for (three steps of nothing: 19 us on
// 16 threads, 30 on 32, 50 on 64), so the best n is the square root of the time
// that one would take.
int UsefulWorkers(int threads, double operations, int64_t items) {
  constexpr double kPerMicrosecond = 0.4e6;  // AMX 0.8e6, other engines 0.2e6
  constexpr double kItem = 2.0;  // packing and storing short sequences
  const double all = static_cast<double>(items);
  const double best =
      std::ceil(std::sqrt(operations / kPerMicrosecond + kItem * all));
  return static_cast<int>(
      std::clamp(std::min(best, all), 1.0, static_cast<double>(threads)));
}

// Cuts one sequence of `pairs` visible pairs, which is to get `wanted` key
// blocks; `workers` is its share of them.
void CutSequence(const Problem& problem, const simd::Engine& engine,
                 const Sequence& sequence, double pairs, int64_t wanted,
                 int64_t workers, BackwardSequence* s) {
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
  s->splits = std::clamp<int64_t>(
      std::min(wanted / kSplitItems, nk / kLeastSplit), 1, kMaxSplits);
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

// Adds the items of a wave.
void ListItems(const Problem& problem, Wave* wave, ForwardPlan* plan) {
  wave->begin = static_cast<int64_t>(plan->items.size());
  for (int64_t i = wave->sequence_begin; i < wave->sequence_end; ++i) {
    const Sequence& s = problem.sequences[i];
    const Blocks& queries = plan->sequences[i].queries;
    for (int64_t block = 0; block < queries.count(); ++block) {
      const double cost = s.mask.Pairs(queries.Block(block), {0, s.nk()});
      for (int64_t head = wave->head_begin * problem.group();
           head < wave->head_end * problem.group(); ++head) {
        plan->items.push_back({static_cast<int32_t>(i),
                               static_cast<int32_t>(head),
                               static_cast<int32_t>(block),
                               static_cast<int32_t>(plan->items.size()), cost});
      }
    }
  }
  wave->end = static_cast<int64_t>(plan->items.size());
  std::sort(plan->items.begin() + wave->begin, plan->items.end(),
            [](const ForwardItem& a, const ForwardItem& b) {
              return a.cost != b.cost ? a.cost > b.cost : a.rank < b.rank;
            });
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
  double total = 0.0;
  for (const Sequence& s : problem.sequences) {
    total += s.mask.Pairs();
  }
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
    CutSequence(problem, engine, s, pairs, wanted, workers, &cut);
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
  SortAlone(&plan->waves);
  steps = plan->waves.alone
              ? static_cast<int64_t>(plan->waves.list.size())
              : std::max({plan->wave_items, plan->wave_chains, steps});
  plan->workers = UsefulWorkers(use.threads, operations, steps);
}

void PlanForward(const Problem& problem, const simd::Engine& engine,
                 int threads, ForwardPlan* plan) {
  plan->sequences.clear();
  plan->key_blocks.clear();
  plan->waves.list.clear();
  plan->items.clear();
  plan->workers = 1;
  plan->wave_heads = plan->wave_k_rows = plan->k_blocks = 0;
  plan->blocks = {0, 0};
  const int64_t query_unit = BlockUnit(engine.query_panel, simd::kTileQueries);
  const int64_t key_unit = BlockUnit(engine.key_panel, simd::kTileKeys);
  simd::BlockSizes preferred =
      engine.forward_blocks(problem.head_dim, problem.value_dim);
  const int64_t owners = std::max<int64_t>(
      1, problem.q_heads * static_cast<int64_t>(problem.sequences.size()));
  double pairs = 0.0;
  for (const Sequence& s : problem.sequences) {
    pairs += s.mask.Pairs();
  }
  plan->waves.alone = threads > 1 && TakeHeadsAlone(problem, pairs, threads);
  const bool as_large_as_liked =
      plan->waves.threads(threads) == 1 && engine.blocks_join;
  int64_t wanted = 1;
  if (!as_large_as_liked) {
    wanted = CeilDiv(kWantedItems, owners);
    preferred.queries = std::min(preferred.queries, kSharedQueries);
  }
  int64_t query_blocks = 0;
  for (size_t i = 0; i < problem.sequences.size(); ++i) {
    const Sequence& s = problem.sequences[i];
    ForwardSequence f;
    f.keys.rows = s.nk();
    f.queries.rows = s.nq();
    f.keys.panel = engine.key_panel;
    f.queries.panel = engine.query_panel;
    f.keys.size = FitBlock(preferred.keys, s.nk(), 1, key_unit);
    f.queries.size = FitBlock(preferred.queries, s.nq(), wanted, query_unit);
    f.k_block = plan->k_blocks;
    plan->k_blocks += f.keys.count();
    ListBlocks(f.keys, i, &plan->key_blocks);
    plan->blocks.keys = std::max(plan->blocks.keys, f.keys.size);
    plan->blocks.queries = std::max(plan->blocks.queries, f.queries.size);
    plan->sequences.push_back(f);
    query_blocks += f.queries.count();
  }
  const double operations = 4.0 * pairs * static_cast<double>(problem.q_heads) *
                            static_cast<double>(problem.head_dim);
  const double least =
      LeastWave(problem, operations, plan->waves.threads(threads),
                kForwardWaveItems, query_blocks * problem.group());
  CutWaves(problem, pairs, least, &plan->waves.list);
  int64_t steps = 0;  // items of one step
  for (Wave& wave : plan->waves.list) {
    if (wave.head_begin == 0) {
      int64_t rows = 0;
      for (int64_t i = wave.sequence_begin; i < wave.sequence_end; ++i) {
        plan->sequences[i].wave_k_row = rows;
        rows += plan->sequences[i].keys.padded();
      }
      plan->wave_k_rows = std::max(plan->wave_k_rows, rows);
    }
    plan->wave_heads = std::max(plan->wave_heads, wave.heads());
    ListItems(problem, &wave, plan);
    steps = std::max({steps, wave.end - wave.begin,
                      2 * plan->KeyBlocks(wave).size() * wave.heads()});
  }
  SortAlone(&plan->waves);
  if (plan->waves.alone) {
    steps = static_cast<int64_t>(plan->waves.list.size());
  }
  plan->workers = UsefulWorkers(threads, operations, steps);
}

}  // namespace fa2::attention
