#include "src/attention/plan.h"

#include <algorithm>
#include <cmath>

namespace fa2::attention {
namespace {

// Items that a plan aims at, as many as 64 cores can take.
constexpr int64_t kWantedItems = 64;
// And what an item is worth at least: some 16 us of an AMX core's time, 100 us
// of another's.
constexpr double kLeastOperations = 16e6;
// Phases end with all workers waiting for the last one (some 10 us).
constexpr int64_t kMaxPhases = 16;
// A wave of heads ends with all workers waiting a few times; each of them gets
// at least this much of it before (some 1 ms on AMX).
constexpr double kLeastWaveOperations = 1e9;
// A block smaller than this does not amortise the calls around it.
constexpr int64_t kMinBlock = 64;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

bool Triangular(const AttentionOptions& options) {
  return options.causal != Causal::kNone && options.window_left < 0;
}

}  // namespace

BlockRange RangeOf(int64_t index, int64_t ranges, int64_t count, bool folded) {
  const auto run = [count](int64_t i, int64_t runs) {
    return Interval{count * i / runs, count * (i + 1) / runs};
  };
  if (!folded) return {{run(index, ranges), {}}};
  return {{run(index, 2 * ranges), run(2 * ranges - 1 - index, 2 * ranges)}};
}

namespace {

// Cuts one sequence, which is to get `wanted` ranges of keys.
void CutSequence(const Problem& problem, const simd::Engine& engine,
                 const Sequence& sequence, int64_t wanted, bool may_group,
                 BackwardSequence* s) {
  const int64_t query_unit = BlockUnit(engine.query_panel, simd::kTileQueries);
  const int64_t key_unit = BlockUnit(engine.key_panel, simd::kTileKeys);
  const simd::BlockSizes preferred =
      engine.backward_blocks(problem.head_dim, problem.value_dim);
  s->keys.rows = sequence.nk();
  s->queries.rows = sequence.nq();
  s->keys.panel = engine.key_panel;
  s->queries.panel = engine.query_panel;
  s->keys.size = FitBlock(preferred.keys, sequence.nk(), wanted, key_unit);
  const int64_t count = s->keys.count();
  // Phases rather than splits, of which each costs a dQ partial, as long as the
  // query ranges hold a block.
  const int64_t wide = std::clamp<int64_t>(
      sequence.nq() / RoundUp(preferred.queries, query_unit), 1, kMaxPhases);
  s->splits = std::clamp<int64_t>(CeilDiv(std::min(wanted, count), wide), 1,
                                  kMaxSplits);
  const bool fold = Triangular(problem.options);
  // A power of two of ranges can be grouped in many ways. Where ranges hold
  // several blocks, a causal mask's work is shared better by ranges of blocks
  // and their mirror images.
  int64_t phases = 1;
  while (phases * s->splits < std::min(wanted, count)) phases *= 2;
  const int64_t range_blocks = CeilDiv(count, phases * s->splits);
  if (may_group && phases > 1 && phases <= kMaxPhases &&
      (range_blocks == 1 || !fold)) {
    const int64_t size =
        FitBlock(preferred.queries, sequence.nq(), phases, query_unit);
    // Query ranges may be empty, but no more than half of them.
    if (phases < 2 * CeilDiv(sequence.nq(), size)) {
      s->phases = phases;
      s->range_keys = range_blocks * s->keys.size;
    }
  }
  if (s->range_keys == 0) {
    s->phases = std::clamp<int64_t>(
        CeilDiv(wanted, s->splits), 1,
        std::clamp<int64_t>(count / s->splits, 1, kMaxPhases));
  }
  s->queries.size =
      FitBlock(preferred.queries, sequence.nq(), s->phases, query_unit);
  if (s->range_keys == 0) {
    s->phases = std::clamp<int64_t>(s->phases, 1,
                                    std::max<int64_t>(1, s->queries.count()));
    s->fold_keys = fold && count >= 2 * s->splits * s->phases;
  }
  s->fold_queries =
      fold && s->phases > 1 && s->queries.count() >= 2 * s->phases;
}

// Items that one kv head gives to a step with ranges in groups of `group`.
int64_t ItemsOfHead(const BackwardPlan& plan, int64_t group) {
  int64_t count = 0;
  for (const BackwardSequence& s : plan.sequences) {
    count += CeilDiv(std::min(s.splits * s.phases, s.keys.count()),
                     std::min(group, s.phases));
  }
  return count;
}

// Groups ranges where threads have items enough: two each to make blocks as
// large as the engine likes, four each beyond that (AMX, 16 threads: one head
// of 4,096 rows ran 17% faster than with one item each, 16 heads of D 64 20%
// faster than with two). One thread takes whole splits.
void GroupRanges(const Problem& problem, const simd::Engine& engine,
                 int threads, BackwardPlan* plan) {
  const simd::BlockSizes preferred =
      engine.backward_blocks(problem.head_dim, problem.value_dim);
  const auto items = [&](int64_t group) {
    return problem.kv_heads * ItemsOfHead(*plan, group);
  };
  const auto most = [&](int64_t items_a_thread) {
    const int64_t enough = threads > 1 ? items_a_thread * threads : 1;
    int64_t group = 1;
    while (group < kMaxPhases && items(2 * group) >= enough) group *= 2;
    return group;
  };
  const int64_t joined = most(2);
  const int64_t grouped = most(4);
  for (BackwardSequence& s : plan->sequences) {
    if (s.range_keys == 0) continue;
    s.group = std::min(grouped, s.phases);
    if (!engine.key_blocks_join || s.range_keys != s.keys.size) continue;
    const int64_t widest =
        std::min(preferred.keys, std::min(joined, s.phases) * s.range_keys);
    while (2 * s.keys.size <= widest) s.keys.size *= 2;
    s.group = std::max(s.group, s.keys.size / s.range_keys);
  }
}

// As few heads as keep the threads busy: what they share of the workspace stays
// in caches (AMX, one thread: 2-5%).
int64_t WaveHeads(const Problem& problem, double operations, int threads,
                  const BackwardPlan& plan) {
  if (threads == 1) return 1;
  int64_t items = 0;
  for (const BackwardSequence& s : plan.sequences) {
    items += std::min(s.splits * s.groups(), s.keys.count());
  }
  const double heads = static_cast<double>(problem.kv_heads);
  const double least = std::max(
      4.0 * threads / static_cast<double>(std::max<int64_t>(items, 1)),
      kLeastWaveOperations * threads * heads / std::max(operations, 1.0));
  // Waves of equal size.
  return CeilDiv(problem.kv_heads,
                 std::max<int64_t>(1, static_cast<int64_t>(heads / least)));
}

// Where the sequences lie in arrays of one head.
void PlaceSequences(BackwardPlan* plan) {
  for (BackwardSequence& s : plan->sequences) {
    s.q_row = plan->q_rows;
    s.k_row = plan->k_rows;
    s.dq_row = plan->dq_rows;
    s.q_block = plan->q_blocks;
    s.k_block = plan->k_blocks;
    s.dq_block = plan->dq_blocks;
    s.part = plan->parts;
    plan->q_rows += s.queries.padded();
    plan->k_rows += s.keys.padded();
    plan->dq_rows += s.splits * s.queries.padded();
    plan->q_blocks += s.queries.count();
    plan->k_blocks += s.keys.count();
    plan->dq_blocks += s.splits * s.queries.count();
    plan->parts += s.splits * s.phases;
    plan->blocks.keys = std::max(plan->blocks.keys, s.keys.size);
    plan->blocks.queries = std::max(plan->blocks.queries, s.queries.size);
    const size_t index = static_cast<size_t>(&s - plan->sequences.data());
    ListBlocks(s.queries, index, &plan->query_blocks);
    plan->shared_key_gradients |= s.phases > 1;
  }
}

// Visible pairs of an item.
double CostOf(const BackwardSequence& s, const Mask& mask,
              const BackwardItem& item) {
  double cost = 0.0;
  ForEachCell(s, item, [&](int64_t, const Interval& keys, int64_t range) {
    const BlockRange queries =
        RangeOf(range, s.phases, s.queries.count(), s.fold_queries);
    for (const Interval& run : queries.runs) {
      cost += mask.Pairs({run.begin * s.queries.size,
                          std::min(run.end * s.queries.size, s.queries.rows)},
                         keys);
    }
  });
  return cost;
}

// The items of one step of the first wave.
void ListItems(const Problem& problem, const BackwardUse& use, int64_t step,
               BackwardPlan* plan) {
  plan->step_begin.push_back(static_cast<int64_t>(plan->items.size()));
  const int64_t sequence_count = static_cast<int64_t>(plan->sequences.size());
  const int64_t item_heads = use.share_heads ? problem.kv_heads : 1;
  for (int64_t i = 0; i < (use.share_batch ? 1 : sequence_count); ++i) {
    const BackwardSequence& s = plan->sequences[i];
    if (step >= s.steps()) continue;
    for (int64_t split = 0; split < s.splits; ++split) {
      for (int64_t group = 0; group < s.groups(); ++group) {
        BackwardItem item;
        item.step = static_cast<int32_t>(step);
        item.split = static_cast<int32_t>(split);
        item.group = static_cast<int32_t>(group);
        item.sequence_begin = static_cast<int32_t>(i);
        item.sequence_end =
            static_cast<int32_t>(use.share_batch ? sequence_count : i + 1);
        item.cost = CostOf(s, problem.sequences[i].mask, item);
        for (int64_t head = 0; head < plan->wave_heads; head += item_heads) {
          item.head_begin = static_cast<int32_t>(head);
          item.head_end = static_cast<int32_t>(head + item_heads);
          item.rank = static_cast<int32_t>(plan->items.size());
          plan->items.push_back(item);
        }
      }
    }
  }
  // std::sort, unlike stable_sort, needs no memory; the ranks make it stable.
  std::sort(plan->items.begin() + plan->step_begin.back(), plan->items.end(),
            [](const BackwardItem& a, const BackwardItem& b) {
              return a.cost != b.cost ? a.cost > b.cost : a.rank < b.rank;
            });
}

}  // namespace

void PlanBackward(const Problem& problem, const simd::Engine& engine,
                  const BackwardUse& use, BackwardPlan* plan) {
  plan->sequences.clear();
  plan->query_blocks.clear();
  plan->items.clear();
  plan->step_begin.clear();
  plan->waves = plan->wave_heads = plan->steps = 0;
  plan->q_rows = plan->k_rows = plan->dq_rows = 0;
  plan->q_blocks = plan->k_blocks = plan->dq_blocks = plan->parts = 0;
  plan->blocks = {0, 0};
  const int64_t sequence_count = static_cast<int64_t>(problem.sequences.size());

  // Each sequence gets items by its share of the work.
  double total = 0.0;
  for (const Sequence& s : problem.sequences) {
    total += s.mask.Pairs({0, s.nq()}, {0, s.nk()});
  }
  const int64_t heads = use.share_heads ? 1 : problem.kv_heads;
  const int64_t owners = (use.share_batch ? 1 : sequence_count) * heads;
  const double operations = 10.0 * total *
                            static_cast<double>(problem.q_heads) *
                            static_cast<double>(problem.head_dim);
  const double items = std::clamp(operations / kLeastOperations, 1.0,
                                  static_cast<double>(kWantedItems));
  plan->shared_key_gradients = owners != sequence_count * problem.kv_heads;
  const bool may_group =
      !use.share_batch && !use.share_heads && !use.score_gradients;
  for (const Sequence& s : problem.sequences) {
    const double pairs = s.mask.Pairs({0, s.nq()}, {0, s.nk()});
    // With shared owners every sequence must be cut alike.
    const double share = use.share_batch || total == 0.0
                             ? 1.0 / (use.share_batch ? 1 : sequence_count)
                             : pairs / total;
    const int64_t wanted = std::max<int64_t>(
        1,
        std::llround(std::ceil(
            items * share / static_cast<double>(std::max<int64_t>(heads, 1)))));
    BackwardSequence cut;
    CutSequence(problem, engine, s, wanted, may_group, &cut);
    plan->sequences.push_back(cut);
  }
  GroupRanges(problem, engine, use.threads, plan);
  PlaceSequences(plan);
  if (sequence_count == 0) return;

  plan->wave_heads = std::max<int64_t>(
      1, use.share_heads ? problem.kv_heads
                         : WaveHeads(problem, operations, use.threads, *plan));
  for (const BackwardSequence& s : plan->sequences) {
    plan->steps = std::max(plan->steps, s.steps());
  }
  plan->waves = CeilDiv(problem.kv_heads, plan->wave_heads);
  for (int64_t step = 0; step < plan->steps; ++step) {
    ListItems(problem, use, step, plan);
  }
  // Later waves are the first with other heads.
  plan->step_begin.push_back(static_cast<int64_t>(plan->items.size()));
  for (int64_t wave = 1; wave < plan->waves; ++wave) {
    for (int64_t step = 0; step < plan->steps; ++step) {
      for (int64_t i = plan->step_begin[step]; i < plan->step_begin[step + 1];
           ++i) {
        BackwardItem item = plan->items[i];
        item.head_begin += static_cast<int32_t>(wave * plan->wave_heads);
        item.head_end += static_cast<int32_t>(wave * plan->wave_heads);
        if (item.head_begin < problem.kv_heads) plan->items.push_back(item);
      }
      plan->step_begin.push_back(static_cast<int64_t>(plan->items.size()));
    }
  }
}

void PlanForward(const Problem& problem, const simd::Engine& engine,
                 int threads, ForwardPlan* plan) {
  plan->sequences.clear();
  plan->key_blocks.clear();
  plan->items.clear();
  plan->k_rows = plan->k_blocks = 0;
  plan->blocks = {0, 0};
  const int64_t query_unit = BlockUnit(engine.query_panel, simd::kTileQueries);
  const int64_t key_unit = BlockUnit(engine.key_panel, simd::kTileKeys);
  const simd::BlockSizes preferred =
      engine.forward_blocks(problem.head_dim, problem.value_dim);
  const int64_t owners = std::max<int64_t>(
      1, problem.q_heads * static_cast<int64_t>(problem.sequences.size()));
  const int64_t wanted = CeilDiv(kWantedItems, owners);
  for (size_t i = 0; i < problem.sequences.size(); ++i) {
    const Sequence& s = problem.sequences[i];
    ForwardSequence f;
    f.keys.rows = s.nk();
    f.queries.rows = s.nq();
    f.keys.panel = engine.key_panel;
    f.queries.panel = engine.query_panel;
    f.keys.size = FitBlock(preferred.keys, s.nk(), 1, key_unit);
    f.queries.size = FitBlock(preferred.queries, s.nq(), wanted, query_unit);
    f.k_row = plan->k_rows;
    f.k_block = plan->k_blocks;
    plan->k_rows += f.keys.padded();
    plan->k_blocks += f.keys.count();
    ListBlocks(f.keys, i, &plan->key_blocks);
    plan->blocks.keys = std::max(plan->blocks.keys, f.keys.size);
    plan->blocks.queries = std::max(plan->blocks.queries, f.queries.size);
    for (int64_t block = 0; block < f.queries.count(); ++block) {
      const double cost = s.mask.Pairs(f.queries.Block(block), {0, s.nk()});
      for (int64_t head = 0; head < problem.q_heads; ++head) {
        plan->items.push_back({static_cast<int32_t>(i),
                               static_cast<int32_t>(head),
                               static_cast<int32_t>(block),
                               static_cast<int32_t>(plan->items.size()), cost});
      }
    }
    plan->sequences.push_back(f);
  }
  std::sort(plan->items.begin(), plan->items.end(),
            [threads](const ForwardItem& a, const ForwardItem& b) {
              if (threads == 1) {
                if (a.sequence != b.sequence) return a.sequence < b.sequence;
                if (a.head != b.head) return a.head < b.head;
              } else if (a.cost != b.cost) {
                return a.cost > b.cost;
              }
              return a.rank < b.rank;
            });
}

}  // namespace fa2::attention
