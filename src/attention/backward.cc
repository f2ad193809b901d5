// FlashAttention-2 backward (Dao 2023, algorithm 2), key blocks outermost. For
// each wave of heads:
//
//   pre-pass   pack Q, dO once a head; delta = rowsum(O dO) - dlse
//   steps      for each item of a step, in parallel:
//                for each key block of the item (pack K, V before the first
//                step, scale, round and store dK, dV after the last)
//                  for each query block of the item, and query head of the
//                  group
//                    S^T = K Q^T, dP^T = V dO^T, P = exp(S - lse),
//                    dS = P (dP - delta); dV += P^T dO, dK += dS^T Q,
//                    dQ += dS K (into the partial of the item's split)
//   reduction  dQ partials in order of their split; scale; round; store
//
// An item owns its rows of dK and dV, and in its step its rows of one dQ
// partial: nothing is added to by two items at once, and every sum has a fixed
// order.
#include <algorithm>
#include <cstring>

#include "src/attention/backward_run.h"
#include "src/attention/pass_call.h"

namespace fa2 {
namespace attention {

void BackwardRun::Execute(threading::Team& team) {
  bias_tiles_.Scan(team);
  memset(dq_touched_, 0,
         static_cast<size_t>(plan_.dq_blocks * problem_.q_heads));
  memset(dkv_touched_, 0,
         static_cast<size_t>(plan_.k_blocks * problem_.kv_heads));
  if (args_.dalibi_slopes.given()) {
    memset(
        dalibi_terms_, 0,
        static_cast<size_t>(plan_.parts * problem_.q_heads) * sizeof(double));
  }
  if (SharesKeys(args_.dbias, problem_)) {
    memset(bias_row_sums_, 0,
           static_cast<size_t>(kMaxSplits * plan_.q_rows * problem_.q_heads) *
               element());
  }
  if (bias_rows_.bytes != 0) memset(bias_rows_.data, 0, bias_rows_.bytes);

  for (int64_t wave = 0; wave < plan_.waves; ++wave) {
    RunWave(team, wave);
  }
  StoreSmallGradients();
  SpreadNonFinite(team);
}

void BackwardRun::RunWave(threading::Team& team, int64_t wave) {
  wave_begin_ = wave * plan_.wave_heads;
  const int64_t wave_end =
      std::min(problem_.kv_heads, wave_begin_ + plan_.wave_heads);
  // Calls run(worker, sequence, head, block) for all blocks of queries, in one
  // step. Heads innermost, as in the plan's items: a worker then finds in its
  // caches what it packed for its heads.
  const int64_t heads = (wave_end - wave_begin_) * problem_.group();
  const auto for_queries = [&](const auto& run) {
    const int64_t blocks = static_cast<int64_t>(plan_.query_blocks.size());
    team.For(blocks * heads, [&](int64_t item, int worker) {
      const BlockIndex& block = plan_.query_blocks[item / heads];
      run(workers_ + worker, block.sequence,
          wave_begin_ * problem_.group() + item % heads, block.block);
    });
  };

  for_queries([&](Worker* worker, int64_t s, int64_t h, int64_t b) {
    PackQueries(worker, s, h, b);
  });

  for (int64_t step = 0; step < plan_.steps; ++step) {
    const size_t index = static_cast<size_t>(wave * plan_.steps + step);
    const int64_t begin = plan_.step_begin[index];
    team.For(plan_.step_begin[index + 1] - begin,
             [&](int64_t item, int worker) {
               RunItem(workers_ + worker, begin + item);
             });
  }

  if (want_dq()) {
    for_queries([&](Worker* worker, int64_t s, int64_t h, int64_t b) {
      StoreQueryGradient(worker, s, h, b);
    });
  }
}

void BackwardRun::RunItem(Worker* worker, int64_t index) const {
  const BackwardItem& item = plan_.items[index];
  const BackwardSequence& s = plan_.sequences[item.sequence_begin];
  const int64_t group = problem_.group();
  // Calls run(sequence, kv head) for all that the item works through.
  const auto for_owned = [&](const auto& run) {
    for (int64_t h = item.head_begin; h < item.head_end; ++h) {
      for (int64_t i = item.sequence_begin; i < item.sequence_end; ++i) {
        run(i, h);
      }
    }
  };
  // Keys are packed before their first visit and their gradients stored after
  // the last one, as long as they are in the worker's caches.
  int64_t block = -1;
  const auto finish = [&] {
    if (block < 0 || item.step != LastStep(s, item, block)) return;
    for_owned([&](int64_t sequence, int64_t head) {
      StoreKeyGradients(worker, sequence, head, block);
    });
  };
  ForEachCell(s, item, [&](int64_t kb, const Interval& shown, int64_t range) {
    if (kb != block) {
      finish();
      block = kb;
      if (item.step == 0) {
        for_owned([&](int64_t sequence, int64_t head) {
          PackKeys(worker, sequence, head, block);
        });
      }
    }
    const BlockRange queries =
        RangeOf(range, s.phases, s.queries.count(), s.fold_queries);
    for (const Interval& query_run : queries.runs) {
      for (int64_t qb = query_run.begin; qb < query_run.end; ++qb) {
        for (int64_t h = item.head_begin * group; h < item.head_end * group;
             ++h) {
          for (int64_t sequence = item.sequence_begin;
               sequence < item.sequence_end; ++sequence) {
            RunBlock(worker, item, sequence, h, kb, shown, qb);
          }
        }
      }
    }
  });
  finish();
}

void BackwardRun::RunBlock(Worker* worker, const BackwardItem& item,
                           int64_t sequence, int64_t head, int64_t key_block,
                           const Interval& shown, int64_t query_block) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  const int64_t kv_head = head / problem_.group();
  BlockPlace place;
  place.sequence = sequence;
  place.head = head;
  place.queries = s.queries.Block(query_block);
  place.keys = s.keys.Block(key_block);
  place.shown = shown;
  place.padded_queries = s.queries.Padded(place.queries);
  place.padded_keys = s.keys.Padded(place.keys);

  // No other block adds to its elements of dbias.
  const bool alone =
      item.sequence_end - item.sequence_begin == 1 &&
      (!SharesHeads(args_.dbias) ||
       (item.head_end - item.head_begin) * problem_.group() == 1);
  simd::BackwardBlock block;
  const bool visible = worker->scores.Prepare(place, &block);
  const bool streams =
      visible && alone && worker->bias.wanted() && worker->bias.can_stream();
  if (visible) {
    const QueryOperand q = Queries(sequence, head, query_block);
    const KeyOperand k = Keys(sequence, kv_head, key_block);
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
      uint8_t* touched = nullptr;
      block.dq =
          QueryGradient(sequence, head, item.split, query_block, &touched);
      block.add_to_dq = *touched != 0;
      *touched = 1;
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
    const bool shared = plan_.shared_key_gradients;
    if (want_dk()) {
      block.dk = shared ? KeyGradient(dk_, problem_.head_dim, sequence, kv_head,
                                      key_block)
                        : worker->dk;
    }
    if (want_dv()) {
      block.dv = shared ? KeyGradient(dv_, problem_.value_dim, sequence,
                                      kv_head, key_block)
                        : worker->dv;
    }
    uint8_t& touched = dkv_touched_[KeyFlag(sequence, kv_head, key_block)];
    block.add_to_dk = block.add_to_dv = touched != 0;
    touched = 1;
    const bool sum_keys = SharesKeys(args_.dbias, problem_);
    if (streams) {
      block.ds_stream = worker->bias.Stream(place);
    } else if (worker->bias.wanted()) {
      block.ds = worker->bias.Target();
    }
    if (sum_keys) block.ds = worker->key_sums_ds;
    if (args_.dalibi_slopes.given()) {
      block.alibi_gradient = dalibi_terms_ + head * plan_.parts + s.part +
                             item.split * s.phases + item.group;
    }
    engine_.backward(block);
    if (sum_keys) {
      const int64_t row =
          BiasRow(item.split, head, sequence) + query_block * s.queries.size;
      staging_.sum_keys(block.ds, worker->scores.Shape(place),
                        bias_row_sums_ + static_cast<size_t>(row) * element());
    }
  }
  if (worker->bias.wanted() && !streams) {
    // A hidden block's other keys are, or have been, another visit's.
    place.keys = place.shown;
    place.padded_keys = s.keys.Padded(place.keys);
    const simd::StagedShape shape = worker->scores.Shape(place);
    worker->bias.Collect(shape, !visible);
    const bool last_sequence = sequence + 1 == item.sequence_end;
    const bool last_head = !SharesHeads(args_.dbias) ||
                           head + 1 == item.head_end * problem_.group();
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
    use.score_gradients =
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
