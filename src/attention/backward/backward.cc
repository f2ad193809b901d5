// FlashAttention-2 backward (Dao 2023, algorithm 2), key blocks outermost. For
// each wave of heads and sequences:
//
//   pre-pass   pack Q, dO once a head; delta = rowsum(O dO) - dlse
//   items      a key block each, in parallel:
//                pack K, V (by_parts in the pre-pass)
//                for each query block, and query head of the group
//                  S^T = K Q^T, dP^T = V dO^T, P = exp(S - lse),
//                  dS = P (dP - delta); dV += P^T dO, dK += dS^T Q,
//                  dQ += dS K (into the partial of the item's split)
//                scale, round and store dK, dV (by_parts in the reduction)
//   reduction  dQ partials in order of their split, those of dK and dV in order
//              of their part; scale; round; store
//
// The items of a split take their turns at each query block, so that every sum
// has a fixed order (threading/wavefront.h). Where many query heads share the
// keys, one worker alone swaps the two loops of the items (RunByQueries).
#include <algorithm>
#include <cstring>

#include "src/attention/backward/backward_run.h"
#include "src/attention/call/pass_call.h"
#include "src/attention/schedule/wave_run.h"

namespace fa2 {
namespace attention {

void BackwardRun::Execute(threading::Team& team) {
  bias_tiles_.Scan(team);
  memset(dq_touched_, 0,
         static_cast<size_t>(plan_.dq_blocks * problem_.q_heads));
  memset(
      dkv_touched_, 0,
      static_cast<size_t>(plan_.k_blocks * problem_.kv_heads * plan_.slots()));
  if (args_.dsinks.given()) {
    std::fill_n(dsink_terms_, SinkTerms() * problem_.q_heads, 0.0);
  }
  if (args_.dalibi_slopes.given()) {
    memset(dalibi_terms_, 0,
           static_cast<size_t>(plan_.k_blocks * problem_.q_heads) *
               sizeof(double));
  }
  if (SharesKeys(args_.dbias, problem_)) {
    memset(bias_row_sums_, 0,
           static_cast<size_t>(kMaxSplits * plan_.q_rows * problem_.q_heads) *
               element());
  }
  if (bias_rows_.bytes != 0) memset(bias_rows_.data, 0, bias_rows_.bytes);

  RunWaves(plan_.waves, team, places_,
           [this](threading::Team& of_wave, const WavePlace& place) {
             RunWave(of_wave, place);
           });
  StoreSmallGradients();
  SpreadNonFinite(team);
}

void BackwardRun::RunWave(threading::Team& team, const WavePlace& place) const {
  // Calls for_queries(worker, sequence, head, block) for all of the wave's
  // blocks of queries and, by_parts, for_keys(worker, sequence, kv head, block)
  // for those of keys, in one step. Heads innermost, as in the plan's items: a
  // worker then finds in its caches what it packed for its heads.
  const int64_t kv_heads = place.wave->heads();
  const int64_t heads = kv_heads * problem_.group();
  const int64_t first_kv_head = place.wave->head_begin;
  const int64_t first_head = first_kv_head * problem_.group();
  const Interval query_blocks = plan_.QueryBlocks(*place.wave);
  const Interval key_blocks = plan_.KeyBlocks(*place.wave);
  const int64_t query_items = query_blocks.size() * heads;
  const int64_t key_items = plan_.by_parts ? key_blocks.size() * kv_heads : 0;
  const auto for_blocks = [&](const auto& for_queries, const auto& for_keys) {
    team.For(query_items + key_items, [&](int64_t item, int worker) {
      if (item < query_items) {
        const BlockIndex& block =
            plan_.query_blocks[query_blocks.begin + item / heads];
        for_queries(workers_ + worker, block.sequence,
                    first_head + item % heads, block.block);
        return;
      }
      item -= query_items;
      const BlockIndex& block =
          plan_.key_blocks[key_blocks.begin + item / kv_heads];
      for_keys(workers_ + worker, block.sequence,
               first_kv_head + item % kv_heads, block.block);
    });
  };

  for_blocks([&](Worker* worker, int64_t s, int64_t h,
                 int64_t b) { PackQueries(worker, s, h, b); },
             [&](Worker* worker, int64_t s, int64_t h, int64_t b) {
               PackKeys(worker, s, h, b);
             });

  if (plan_.by_queries) {
    team.For(1, [&](int64_t, int worker) {
      RunByQueries(workers_ + worker, place);
    });
  } else {
    RunChains(team, place);
  }

  if (!want_dq() && !plan_.by_parts) return;
  for_blocks(
      [&](Worker* worker, int64_t s, int64_t h, int64_t b) {
        if (want_dq()) StoreQueryGradient(worker, s, h, b);
      },
      [&](Worker* worker, int64_t s, int64_t h, int64_t b) {
        StoreKeyGradients(worker, s, h, b);
      });
}

void BackwardRun::RunChains(threading::Team& team,
                            const WavePlace& place) const {
  const BackwardChain* const chains = plan_.chains.data() + place.wave->begin;
  const int64_t count = place.wave->end - place.wave->begin;
  threading::Wavefront::Counter* counter = place.counters;
  const auto take_counters = [&counter](int64_t n) {
    threading::Wavefront::Counter* const taken = counter;
    for (int64_t i = 0; i < n; ++i) {
      new (counter++) threading::Wavefront::Counter();
    }
    return taken;
  };
  for (int64_t c = 0; c < count; ++c) {
    const BackwardSequence& s = plan_.sequences[chains[c].sequence_begin];
    const int64_t items = s.keys.RunBlocks(chains[c].split).size();
    place.chains[c] = {items, chains[c].cost / std::max<double>(1.0, items),
                       take_counters(1), take_counters(items)};
  }
  threading::Wavefront::Run(
      team, place.chains, count,
      [&](int64_t c, int64_t item, int worker,
          threading::Wavefront::Turn& turn) {
        const BackwardSequence& s = plan_.sequences[chains[c].sequence_begin];
        RunKeys(workers_ + worker, chains[c],
                s.keys.RunBlocks(chains[c].split).begin + item, &turn);
      });
}

// Runs cells in the order in which they are named, each when the next is known.
class BackwardRun::Cells {
 public:
  Cells(const BackwardRun& run, Worker* worker,
        threading::Wavefront::Turn* turn)
      : run_(run), worker_(worker), turn_(turn) {}
  // One block of keys and one run of queries, of a part of all kv heads of a
  // chain.
  void Next(const BackwardChain& chain, int64_t part, int64_t query_run,
            int64_t key_block) {
    const Interval blocks =
        run_.plan_.sequences[chain.sequence_begin].queries.RunBlocks(query_run);
    const int64_t slot = run_.plan_.Slot(part);
    for (int64_t kv_head = chain.head_begin; kv_head < chain.head_end;
         ++kv_head) {
      const Interval heads = run_.plan_.PartHeads(kv_head, part);
      for (int64_t head = heads.begin; head < heads.end; ++head) {
        for (int64_t i = chain.sequence_begin; i < chain.sequence_end; ++i) {
          for (int64_t block = blocks.begin; block < blocks.end; ++block) {
            Next(chain, {head, slot, i, block, key_block});
          }
        }
      }
    }
  }
  void Finish() {
    Run(nullptr);
    pending_ = false;
  }

 private:
  void Next(const BackwardChain& chain, const Cell& cell) {
    Run(&cell);
    chain_ = chain;
    cell_ = cell;
    pending_ = true;
    ++index_;
  }
  void Run(const Cell* next) {
    if (!pending_) return;
    run_.RunBlock(worker_, chain_, cell_, next, {turn_, index_});
  }

  const BackwardRun& run_;
  Worker* const worker_;
  threading::Wavefront::Turn* const turn_;
  BackwardChain chain_;
  Cell cell_ = {};
  bool pending_ = false;
  int64_t index_ = -1;
};

void BackwardRun::RunKeys(Worker* worker, const BackwardChain& chain,
                          int64_t key_block,
                          threading::Wavefront::Turn* turn) const {
  const BackwardSequence& s = plan_.sequences[chain.sequence_begin];
  // Calls run(sequence, kv head) for all that the item works through.
  const auto for_owned = [&](const auto& run) {
    for (int64_t h = chain.head_begin; h < chain.head_end; ++h) {
      for (int64_t i = chain.sequence_begin; i < chain.sequence_end; ++i) {
        run(i, h);
      }
    }
  };
  if (!plan_.by_parts) {
    for_owned([&](int64_t sequence, int64_t head) {
      PackKeys(worker, sequence, head, key_block);
    });
  }
  Cells cells(*this, worker, turn);
  for (int64_t part = chain.part_begin; part < chain.part_end; ++part) {
    for (int64_t run = s.queries.runs() - 1; run >= 0; --run) {
      cells.Next(chain, part, run, key_block);
    }
    cells.Finish();
    // The last one is added when it is stored.
    if (part != 0 && part + 1 < chain.part_end) {
      for_owned([&](int64_t sequence, int64_t head) {
        JoinKeyGradients(worker, sequence, head, key_block);
      });
    }
  }
  if (!plan_.by_parts) {
    for_owned([&](int64_t sequence, int64_t head) {
      StoreKeyGradients(worker, sequence, head, key_block);
    });
  }
}

void BackwardRun::RunByQueries(Worker* worker, const WavePlace& place) const {
  const Wave& wave = *place.wave;
  for (int64_t i = wave.sequence_begin; i < wave.sequence_end; ++i) {
    const BackwardSequence& s = plan_.sequences[i];
    for (int64_t kv_head = wave.head_begin; kv_head < wave.head_end;
         ++kv_head) {
      for (int64_t k = 0; k < s.keys.count(); ++k) {
        PackKeys(worker, i, kv_head, k);
      }
      BackwardChain chain;
      chain.sequence_begin = static_cast<int32_t>(i);
      chain.sequence_end = chain.sequence_begin + 1;
      chain.head_begin = static_cast<int32_t>(kv_head);
      chain.head_end = chain.head_begin + 1;
      Cells cells(*this, worker, nullptr);
      for (int64_t run = s.queries.runs() - 1; run >= 0; --run) {
        for (int64_t k = 0; k < s.keys.count(); ++k) {
          chain.split =
              static_cast<int32_t>(s.keys.Block(k).begin / s.keys.run);
          cells.Next(chain, 0, run, k);
        }
      }
      cells.Finish();
      for (int64_t k = 0; k < s.keys.count(); ++k) {
        StoreKeyGradients(worker, i, kv_head, k);
      }
    }
  }
}

void BackwardRun::RunBlock(Worker* worker, const BackwardChain& chain,
                           const Cell& cell, const Cell* next,
                           CellTurn turn) const {
  const auto [head, slot, sequence, query_block, key_block] = cell;
  const BackwardSequence& s = plan_.sequences[sequence];
  const int64_t kv_head = head / problem_.group();
  BlockPlace place;
  place.sequence = sequence;
  place.head = head;
  place.queries = s.queries.Block(query_block);
  place.keys = s.keys.Block(key_block);
  place.padded_queries = s.queries.Padded(place.queries);
  place.padded_keys = s.keys.Padded(place.keys);
  if (next != nullptr && next->sequence == sequence) {
    place.next_head = next->head;
    place.next_queries = s.queries.Block(next->query_block);
    place.next_keys = s.keys.Block(next->key_block);
  }

  // No other block adds to its elements of dbias.
  const bool alone =
      chain.sequence_end - chain.sequence_begin == 1 &&
      (!SharesHeads(args_.dbias) ||
       (chain.head_end - chain.head_begin) * problem_.group() == 1);
  simd::BackwardBlock block;
  const bool visible = worker->scores.Prepare(place, &block);
  const bool streams =
      visible && alone && worker->bias.wanted() && worker->bias.can_stream();
  if (visible) {
    const QueryOperand q = Queries(*worker->place, sequence, head, query_block);
    const KeyOperand k = Keys(*worker, sequence, kv_head, slot, key_block);
    block.scratch = worker->engine_scratch;
    block.k_score = k.k_score;
    block.v_score = k.v_score;
    block.k_grad = k.k_grad;
    block.q_score = q.q_score;
    block.q_grad = q.q_grad;
    block.dout_score = q.dout_score;
    block.dout_grad = q.dout_grad;
    block.lse = q.lse;
    block.delta = q.delta;
    if (want_dq()) {
      block.dq = QueryGradient(*worker->place, sequence, head, chain.split,
                               query_block, &turn.dq_touched);
      block.dq_semaphore = {&CellTurn::WaitDq, &CellTurn::ReleaseDq, &turn};
      if (engine_.grad_left_is_score_left &&
          k_non_finite_[KeyFlag(sequence, kv_head, key_block)] != 0) {
        engine_.pack(
            simd::Role::kGradLeft,
            worker->rows.Read(
                problem_.k, problem_.sequences[sequence].batch, kv_head,
                problem_.sequences[sequence].k_begin + place.keys.begin,
                place.keys.size()),
            place.padded_keys, true, worker->k_finite);
        block.k_grad = worker->k_finite;
      }
    }
    if (want_dk()) block.dk = k.dk;
    if (want_dv()) block.dv = k.dv;
    uint8_t& touched = KeysTouched(sequence, kv_head, slot, key_block);
    block.add_to_dk = block.add_to_dv = touched != 0;
    touched = 1;
    const bool sum_keys = SharesKeys(args_.dbias, problem_);
    turn.ends_with_dq = !sum_keys;
    if (streams) {
      block.ds_stream = worker->bias.Stream(place);
    } else if (worker->bias.wanted()) {
      block.ds = worker->bias.Target();
    }
    if (sum_keys) block.ds = worker->key_sums_ds;
    if (args_.dalibi_slopes.given()) {
      block.alibi_gradient =
          dalibi_terms_ + head * plan_.k_blocks + s.k_block + key_block;
    }
    engine_.backward(block);
    if (sum_keys) {
      turn.Await();
      const int64_t row =
          BiasRow(chain.split, head, sequence) + query_block * s.queries.size;
      staging_.sum_keys(block.ds, worker->scores.Shape(place),
                        bias_row_sums_ + static_cast<size_t>(row) * element());
    }
  }
  turn.Finish();
  if (worker->bias.wanted() && !streams) {
    const simd::StagedShape shape = worker->scores.Shape(place);
    worker->bias.Collect(shape, !visible);
    const bool last_sequence = sequence + 1 == chain.sequence_end;
    const bool last_head = !SharesHeads(args_.dbias) ||
                           head + 1 == chain.head_end * problem_.group();
    if (last_sequence && last_head) worker->bias.Finish(place, shape);
  }
}

namespace {

struct BackwardPass {
  using Args = AttentionBackwardArgs;
  using Plan = BackwardPlan;
  using Run = BackwardRun;
  static Status Check(const Args& args, Problem* problem) {
    return CheckBackward(args, problem);
  }
  static void MakePlan(const Args& args, const Problem& problem,
                       const simd::Engine& engine, int threads, Plan* plan) {
    const TensorView dbias = BlockBiasGradient(args.dbias, problem);
    BackwardUse use;
    use.share_batch = SharesBatch(dbias) && problem.sequences.size() > 1;
    use.share_heads = SharesHeads(dbias) && problem.q_heads > 1;
    // Every element of dbias comes from one of dS and streams out.
    const bool streams = dbias.given() && engine.streams_scores &&
                         !use.share_batch && !use.share_heads &&
                         !SharesQueries(dbias, problem);
    // Sums of blocks.
    use.fixed_blocks =
        (args.dbias.given() && !streams) || args.dalibi_slopes.given();
    use.threads = threads;
    PlanBackward(problem, engine, use, plan);
  }
};

}  // namespace
}  // namespace attention

Status AttentionBackward(const AttentionBackwardArgs& args, Context* context) {
  return attention::PassCall<attention::BackwardPass>::Run(args, context);
}

Status AttentionBackwardWorkspace(const AttentionBackwardArgs& args,
                                  size_t* bytes, Context* context) {
  return attention::PassCall<attention::BackwardPass>::Workspace(args, bytes,
                                                                 context);
}

}  // namespace fa2
