// What the backward keeps in its workspace: packed operands, statistics,
// accumulators of a wave of heads, flags of the call, what each worker needs;
// and where the blocks of them lie.
#include <algorithm>

#include "src/attention/backward/backward_run.h"
#include "src/attention/schedule/wave_run.h"

namespace fa2 {
namespace attention {

BackwardRun::BackwardRun(const AttentionBackwardArgs& args,
                         const Problem& problem, const BackwardPlan& plan,
                         const simd::Engine& engine, int64_t targets,
                         Carver* carver)
    : args_(args),
      problem_(problem),
      plan_(plan),
      engine_(engine),
      row_kernels_(*simd::RowKernelsFor(engine.accumulator, targets)),
      staging_(*simd::StagingKernelsFor(engine.accumulator, targets)),
      bias_tiles_(problem, args.dbias.given(), targets, carver),
      alibi_reach_(problem, row_kernels_, carver),
      bias_rows_(block_dbias(), problem, engine, carver) {
  bias_row_sums_ = carver->Take(
      SharesKeys(args.dbias, problem)
          ? static_cast<size_t>(kMaxSplits * plan.q_rows * problem.q_heads) *
                element()
          : 0);
  const size_t q_blocks = static_cast<size_t>(plan.q_blocks * problem.q_heads);
  const size_t k_blocks = static_cast<size_t>(plan.k_blocks * problem.kv_heads);
  dq_touched_ = carver->Take<uint8_t>(
      static_cast<size_t>(plan.dq_blocks * problem.q_heads));
  dkv_touched_ =
      carver->Take<uint8_t>(k_blocks * static_cast<size_t>(plan.slots()));
  q_non_finite_ = carver->Take<uint8_t>(q_blocks);
  dout_non_finite_ = carver->Take<uint8_t>(q_blocks);
  k_non_finite_ = carver->Take<uint8_t>(k_blocks);
  dsink_terms_ = carver->Take<double>(
      args.dsinks.given() ? static_cast<size_t>(SinkTerms() * problem.q_heads)
                          : 0);
  dalibi_terms_ = carver->Take<double>(
      args.dalibi_slopes.given()
          ? static_cast<size_t>(plan.k_blocks * problem.q_heads)
          : 0);
  places_ =
      carver->Construct<WavePlace>(plan.waves.places(plan.workers), *this);
  workers_ = carver->Construct<Worker>(plan.workers, *this);
  ShareOutPlaces(plan.waves, places_, plan.workers, workers_);
}

BackwardRun::WavePlace::WavePlace(const BackwardRun& run, Carver* carver) {
  const BackwardPlan& plan = run.plan_;
  const simd::Engine& engine = run.engine_;
  const int64_t wave_queries = plan.wave_heads * run.problem_.group();
  const int64_t q_rows = plan.wave_q_rows * wave_queries;
  const int64_t d = run.problem_.head_dim;
  const int64_t dv = run.problem_.value_dim;
  const auto packed = [&](bool wanted, simd::Role role, int64_t depth) {
    return carver->Take(wanted ? engine.packed_bytes(role, q_rows, depth) : 0);
  };
  using simd::Role;
  q_score = packed(true, Role::kScoreRight, d);
  q_grad = packed(run.want_dk(), Role::kGradRight, d);
  dout_score = packed(true, Role::kScoreRight, dv);
  dout_grad = packed(run.want_dv(), Role::kGradRight, dv);
  const size_t statistics = static_cast<size_t>(q_rows) * run.element();
  lse = carver->Take(statistics);
  delta = carver->Take(statistics);
  dq = carver->Take(run.want_dq() ? engine.query_accumulator_bytes(
                                        plan.wave_dq_rows * wave_queries, d)
                                  : 0);
  keys = run.TakeKeys(plan.shared_keys ? plan.wave_k_rows : 0, plan.wave_heads,
                      carver);
  const size_t most = static_cast<size_t>(plan.wave_chains);
  chains = carver->Take<threading::Wavefront::Chain>(most);
  counters = carver->Take<threading::Wavefront::Counter>(
      most + static_cast<size_t>(plan.wave_items));
}

BackwardRun::Worker::Worker(const BackwardRun& run, Carver* carver)
    : scores(run.problem_, run.engine_, run.staging_, run.bias_tiles_,
             run.alibi_reach_, run.plan_.blocks,
             run.args_.dalibi_slopes.given(), carver),
      rows({run.problem_.q, run.problem_.k, run.problem_.v, run.args_.out,
            run.args_.dout, run.args_.dq, run.args_.dk, run.args_.dv},
           LeaveCaches({run.args_.dq, run.args_.dk, run.args_.dv},
                       run.plan_.workers),
           run.engine_, run.row_kernels_,
           std::max(run.plan_.blocks.keys, run.plan_.blocks.queries), carver),
      bias(run.block_dbias(), run.args_.accumulate_dbias, run.problem_,
           run.engine_, run.staging_, run.row_kernels_, run.plan_.blocks,
           run.bias_rows_, carver) {
  const simd::Engine& engine = run.engine_;
  const int64_t block_keys = run.plan_.blocks.keys;
  const int64_t d = run.problem_.head_dim;
  const int64_t value_dim = run.problem_.value_dim;
  engine_scratch = carver->Take(
      engine.backward_scratch_bytes(run.plan_.blocks, d, value_dim));
  keys = run.TakeKeys(run.plan_.shared_keys ? 0 : block_keys, 1, carver);
  key_sums_ds = carver->Take(
      SharesKeys(run.args_.dbias, run.problem_)
          ? static_cast<size_t>(block_keys * run.plan_.blocks.queries) *
                run.element()
          : 0);
  k_finite = carver->Take(
      run.want_dq() && engine.grad_left_is_score_left
          ? engine.packed_bytes(simd::Role::kGradLeft, block_keys, d)
          : 0);
}

BackwardRun::QueryOperand BackwardRun::Queries(const WavePlace& place,
                                               int64_t sequence, int64_t head,
                                               int64_t block) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  const int64_t row = WaveQueryHead(*place.wave, head) * plan_.wave_q_rows +
                      s.wave_q_row + block * s.queries.size;
  const int64_t d = problem_.head_dim;
  const int64_t dv = problem_.value_dim;
  using simd::Role;
  return {place.q_score + engine_.packed_bytes(Role::kScoreRight, row, d),
          place.q_grad + engine_.packed_bytes(Role::kGradRight, row, d),
          place.dout_score + engine_.packed_bytes(Role::kScoreRight, row, dv),
          place.dout_grad + engine_.packed_bytes(Role::kGradRight, row, dv),
          place.lse + static_cast<size_t>(row) * element(),
          place.delta + static_cast<size_t>(row) * element()};
}

BackwardRun::KeyOperand BackwardRun::TakeKeys(int64_t rows, int64_t heads,
                                              Carver* carver) const {
  const int64_t d = problem_.head_dim;
  const int64_t dv = problem_.value_dim;
  const auto packed = [&](bool wanted, simd::Role role, int64_t depth) {
    return carver->Take(wanted ? engine_.packed_bytes(role, rows * heads, depth)
                               : 0);
  };
  const auto sums = [&](bool wanted, int64_t depth) {
    return carver->Take(wanted ? engine_.key_accumulator_bytes(
                                     rows * heads * plan_.slots(), depth)
                               : 0);
  };
  KeyOperand keys;
  keys.k_score = packed(true, simd::Role::kScoreLeft, d);
  keys.k_grad = engine_.grad_left_is_score_left
                    ? keys.k_score
                    : packed(want_dq(), simd::Role::kGradLeft, d);
  keys.v_score = packed(true, simd::Role::kScoreLeft, dv);
  keys.dk = sums(want_dk(), d);
  keys.dv = sums(want_dv(), dv);
  return keys;
}

BackwardRun::KeyOperand BackwardRun::Keys(const Worker& worker,
                                          int64_t sequence, int64_t head,
                                          int64_t slot, int64_t block) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  KeyOperand keys = worker.keys;
  int64_t packed_row = 0, sum_row = slot * plan_.blocks.keys;
  if (plan_.shared_keys) {
    keys = worker.place->keys;
    const int64_t wave_head = head - worker.place->wave->head_begin;
    const int64_t row = s.wave_k_row + s.keys.Block(block).begin;
    packed_row = wave_head * plan_.wave_k_rows + row;
    sum_row = (wave_head * plan_.slots() + slot) * plan_.wave_k_rows + row;
  }
  const auto packed = [&](std::byte* base, simd::Role role, int64_t depth) {
    return base + engine_.packed_bytes(role, packed_row, depth);
  };
  const auto sums = [&](std::byte* base, int64_t depth) {
    return base + engine_.key_accumulator_bytes(sum_row, depth);
  };
  const int64_t d = problem_.head_dim;
  const int64_t dv = problem_.value_dim;
  return {packed(keys.k_score, simd::Role::kScoreLeft, d),
          packed(keys.k_grad, simd::Role::kGradLeft, d),
          packed(keys.v_score, simd::Role::kScoreLeft, dv), sums(keys.dk, d),
          sums(keys.dv, dv)};
}

int64_t BackwardRun::QueryFlag(int64_t sequence, int64_t head,
                               int64_t block) const {
  return head * plan_.q_blocks + plan_.sequences[sequence].q_block + block;
}

int64_t BackwardRun::KeyFlag(int64_t sequence, int64_t head,
                             int64_t block) const {
  return head * plan_.k_blocks + plan_.sequences[sequence].k_block + block;
}

uint8_t& BackwardRun::KeysTouched(int64_t sequence, int64_t head, int64_t slot,
                                  int64_t block) const {
  return dkv_touched_[KeyFlag(sequence, head, block) * plan_.slots() + slot];
}

std::byte* BackwardRun::QueryGradient(const WavePlace& place, int64_t sequence,
                                      int64_t head, int64_t split,
                                      int64_t block, uint8_t** touched) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  *touched = dq_touched_ + head * plan_.dq_blocks + s.dq_block +
             split * s.queries.count() + block;
  const int64_t row = WaveQueryHead(*place.wave, head) * plan_.wave_dq_rows +
                      s.wave_dq_row + split * s.queries.padded() +
                      block * s.queries.size;
  return place.dq + engine_.query_accumulator_bytes(row, problem_.head_dim);
}

}  // namespace attention
}  // namespace fa2
