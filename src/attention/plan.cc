#include "src/attention/plan.h"

#include <algorithm>
#include <cmath>

namespace fa2::attention {
namespace {

// Items of one phase that the plan aims at: two for each of 64 cores, so that
// the last ones to finish leave little idle time.
constexpr int64_t kWantedItems = 128;
// Phases end with all workers waiting for the last one (some 10 us).
constexpr int64_t kMaxPhases = 16;
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

void PlanBackward(const Problem& problem, const simd::Engine& engine,
                  bool share_batch, bool share_heads, BackwardPlan* plan) {
  plan->sequences.clear();
  plan->query_blocks.clear();
  plan->key_blocks.clear();
  plan->items.clear();
  plan->phase_begin.clear();
  plan->q_rows = plan->k_rows = plan->dq_rows = 0;
  plan->q_blocks = plan->k_blocks = plan->dq_blocks = plan->parts = 0;
  plan->blocks = {0, 0};

  const int64_t query_unit = BlockUnit(engine.query_panel, simd::kTileQueries);
  const int64_t key_unit = BlockUnit(engine.key_panel, simd::kTileKeys);
  const simd::BlockSizes preferred =
      engine.backward_blocks(problem.head_dim, problem.value_dim);
  const int64_t sequence_count = static_cast<int64_t>(problem.sequences.size());

  // Each sequence gets items by its share of the work.
  double total = 0.0;
  for (const Sequence& s : problem.sequences) {
    total += s.mask.Pairs({0, s.nq()}, {0, s.nk()});
  }
  const int64_t owners =
      (share_batch ? 1 : sequence_count) * (share_heads ? 1 : problem.kv_heads);
  int64_t phases = 1;
  plan->shared_key_gradients = owners != sequence_count * problem.kv_heads;
  for (const Sequence& s : problem.sequences) {
    const double pairs = s.mask.Pairs({0, s.nq()}, {0, s.nk()});
    // With shared owners every sequence must be cut alike.
    const double share = share_batch || total == 0.0
                             ? 1.0 / (share_batch ? 1 : sequence_count)
                             : pairs / total;
    const double heads =
        share_heads ? 1.0 : static_cast<double>(problem.kv_heads);
    const int64_t wanted = std::max<int64_t>(
        1,
        std::llround(std::ceil(kWantedItems * share / std::max(heads, 1.0))));
    BackwardSequence q;
    q.keys.rows = s.nk();
    q.queries.rows = s.nq();
    q.keys.panel = engine.key_panel;
    q.queries.panel = engine.query_panel;
    q.keys.size = FitBlock(preferred.keys, s.nk(), wanted, key_unit);
    q.splits =
        std::clamp<int64_t>(std::min(wanted, q.keys.count()), 1, kMaxSplits);
    const int64_t ranges_left = std::max<int64_t>(1, q.keys.count() / q.splits);
    q.phases = std::clamp<int64_t>(CeilDiv(wanted, q.splits), 1,
                                   std::min(kMaxPhases, ranges_left));
    q.queries.size = FitBlock(preferred.queries, s.nq(), q.phases, query_unit);
    q.phases = std::clamp<int64_t>(q.phases, 1,
                                   std::max<int64_t>(1, q.queries.count()));
    const bool fold = Triangular(problem.options);
    q.fold_keys = fold && q.keys.count() >= 2 * q.splits * q.phases;
    q.fold_queries = fold && q.phases > 1 && q.queries.count() >= 2 * q.phases;
    q.q_row = plan->q_rows;
    q.k_row = plan->k_rows;
    q.dq_row = plan->dq_rows;
    q.q_block = plan->q_blocks;
    q.k_block = plan->k_blocks;
    q.dq_block = plan->dq_blocks;
    q.part = plan->parts;
    plan->q_rows += q.queries.padded();
    plan->k_rows += q.keys.padded();
    plan->dq_rows += q.splits * q.queries.padded();
    plan->q_blocks += q.queries.count();
    plan->k_blocks += q.keys.count();
    plan->dq_blocks += q.splits * q.queries.count();
    plan->parts += q.splits * q.phases;
    plan->blocks.keys = std::max(plan->blocks.keys, q.keys.size);
    plan->blocks.queries = std::max(plan->blocks.queries, q.queries.size);
    phases = std::max(phases, q.phases);
    ListBlocks(q.queries, plan->sequences.size(), &plan->query_blocks);
    ListBlocks(q.keys, plan->sequences.size(), &plan->key_blocks);
    plan->shared_key_gradients |= q.phases > 1;
    plan->sequences.push_back(q);
  }
  if (sequence_count == 0) return;

  for (int64_t phase = 0; phase < phases; ++phase) {
    plan->phase_begin.push_back(static_cast<int64_t>(plan->items.size()));
    for (int64_t i = 0; i < (share_batch ? 1 : sequence_count); ++i) {
      const BackwardSequence& q = plan->sequences[i];
      const Mask& mask = problem.sequences[i].mask;
      if (phase >= q.phases) continue;
      for (int64_t split = 0; split < q.splits; ++split) {
        for (int64_t range = 0; range < q.phases; ++range) {
          const BlockRange keys =
              RangeOf(split * q.phases + range, q.splits * q.phases,
                      q.keys.count(), q.fold_keys);
          const BlockRange queries =
              RangeOf((range + phase) % q.phases, q.phases, q.queries.count(),
                      q.fold_queries);
          double cost = 0.0;
          for (const Interval& k : keys.runs) {
            for (const Interval& r : queries.runs) {
              cost +=
                  mask.Pairs({r.begin * q.queries.size,
                              std::min(r.end * q.queries.size, q.queries.rows)},
                             {k.begin * q.keys.size,
                              std::min(k.end * q.keys.size, q.keys.rows)});
            }
          }
          for (int64_t head = 0; head < (share_heads ? 1 : problem.kv_heads);
               ++head) {
            BackwardItem item;
            item.phase = static_cast<int32_t>(phase);
            item.split = static_cast<int32_t>(split);
            item.range = static_cast<int32_t>(range);
            item.sequence_begin = static_cast<int32_t>(i);
            item.sequence_end =
                static_cast<int32_t>(share_batch ? sequence_count : i + 1);
            item.head_begin = static_cast<int32_t>(head);
            item.head_end =
                static_cast<int32_t>(share_heads ? problem.kv_heads : head + 1);
            item.cost = cost;
            item.rank = static_cast<int32_t>(plan->items.size());
            plan->items.push_back(item);
          }
        }
      }
    }
    // std::sort, unlike stable_sort, needs no memory; the ranks make it stable.
    std::sort(plan->items.begin() + plan->phase_begin.back(), plan->items.end(),
              [](const BackwardItem& a, const BackwardItem& b) {
                return a.cost != b.cost ? a.cost > b.cost : a.rank < b.rank;
              });
  }
  plan->phase_begin.push_back(static_cast<int64_t>(plan->items.size()));
}

void PlanForward(const Problem& problem, const simd::Engine& engine,
                 ForwardPlan* plan) {
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
            [](const ForwardItem& a, const ForwardItem& b) {
              return a.cost != b.cost ? a.cost > b.cost : a.rank < b.rank;
            });
}

}  // namespace fa2::attention
