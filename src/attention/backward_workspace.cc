// What the backward keeps in its workspace: packed operands, statistics,
// accumulators of a wave of heads, flags of the call, what each worker needs;
// and where the blocks of them lie.
#include <algorithm>

#include "src/attention/backward_run.h"

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
  const int64_t wave_queries = plan.wave_heads * problem.group();
  const int64_t q_rows = plan.q_rows * wave_queries;
  const int64_t k_rows = plan.k_rows * plan.wave_heads;
  const int64_t d = problem.head_dim;
  const int64_t dv = problem.value_dim;
  const auto packed = [&](bool wanted, simd::Role role, int64_t rows,
                          int64_t depth) {
    return carver->Take(wanted ? engine.packed_bytes(role, rows, depth) : 0);
  };
  using simd::Role;
  q_score_ = packed(true, Role::kScoreRight, q_rows, d);
  q_grad_ = packed(want_dk(), Role::kGradRight, q_rows, d);
  dout_score_ = packed(true, Role::kScoreRight, q_rows, dv);
  dout_grad_ = packed(want_dv(), Role::kGradRight, q_rows, dv);
  const size_t statistics = static_cast<size_t>(q_rows) * element();
  lse_ = carver->Take(statistics);
  delta_ = carver->Take(statistics);
  bias_row_sums_ = carver->Take(
      SharesKeys(args.dbias, problem)
          ? static_cast<size_t>(kMaxSplits * plan.q_rows * problem.q_heads) *
                element()
          : 0);
  dq_ = carver->Take(
      want_dq() ? engine.query_accumulator_bytes(plan.dq_rows * wave_queries, d)
                : 0);
  keys_ = TakeKeys(plan.shared_keys ? k_rows : 0, carver);
  const size_t q_blocks = static_cast<size_t>(plan.q_blocks * problem.q_heads);
  const size_t k_blocks = static_cast<size_t>(plan.k_blocks * problem.kv_heads);
  dq_touched_ = carver->Take<uint8_t>(
      static_cast<size_t>(plan.dq_blocks * problem.q_heads));
  dkv_touched_ = carver->Take<uint8_t>(k_blocks);
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
  // The first wave has as many as any.
  const size_t chains =
      plan.waves > 0 ? static_cast<size_t>(plan.wave_begin[1]) : 0;
  chains_ = carver->Take<threading::Wavefront::Chain>(chains);
  counters_ = carver->Take<threading::Wavefront::Counter>(
      chains + static_cast<size_t>(plan.wave_items));
  workers_ = carver->Construct<Worker>(plan.workers, *this);
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
  keys = run.TakeKeys(run.plan_.shared_keys ? 0 : block_keys, carver);
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

BackwardRun::QueryOperand BackwardRun::Queries(int64_t sequence, int64_t head,
                                               int64_t block) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  const int64_t row = (head - wave_begin_ * problem_.group()) * plan_.q_rows +
                      s.q_row + block * s.queries.size;
  const int64_t d = problem_.head_dim;
  const int64_t dv = problem_.value_dim;
  using simd::Role;
  return {q_score_ + engine_.packed_bytes(Role::kScoreRight, row, d),
          q_grad_ + engine_.packed_bytes(Role::kGradRight, row, d),
          dout_score_ + engine_.packed_bytes(Role::kScoreRight, row, dv),
          dout_grad_ + engine_.packed_bytes(Role::kGradRight, row, dv),
          lse_ + static_cast<size_t>(row) * element(),
          delta_ + static_cast<size_t>(row) * element()};
}

BackwardRun::KeyOperand BackwardRun::TakeKeys(int64_t rows,
                                              Carver* carver) const {
  const int64_t d = problem_.head_dim;
  const int64_t dv = problem_.value_dim;
  const auto packed = [&](bool wanted, simd::Role role, int64_t depth) {
    return carver->Take(wanted ? engine_.packed_bytes(role, rows, depth) : 0);
  };
  const auto sums = [&](bool wanted, int64_t depth) {
    return carver->Take(wanted ? engine_.key_accumulator_bytes(rows, depth)
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
                                          int64_t block) const {
  if (!plan_.shared_keys) return worker.keys;
  const BackwardSequence& s = plan_.sequences[sequence];
  const int64_t row =
      (head - wave_begin_) * plan_.k_rows + s.k_row + s.keys.Block(block).begin;
  const auto packed = [&](std::byte* base, simd::Role role, int64_t depth) {
    return base + engine_.packed_bytes(role, row, depth);
  };
  const auto sums = [&](std::byte* base, int64_t depth) {
    return base + engine_.key_accumulator_bytes(row, depth);
  };
  const int64_t d = problem_.head_dim;
  const int64_t dv = problem_.value_dim;
  return {packed(keys_.k_score, simd::Role::kScoreLeft, d),
          packed(keys_.k_grad, simd::Role::kGradLeft, d),
          packed(keys_.v_score, simd::Role::kScoreLeft, dv), sums(keys_.dk, d),
          sums(keys_.dv, dv)};
}

int64_t BackwardRun::QueryFlag(int64_t sequence, int64_t head,
                               int64_t block) const {
  return head * plan_.q_blocks + plan_.sequences[sequence].q_block + block;
}

int64_t BackwardRun::KeyFlag(int64_t sequence, int64_t head,
                             int64_t block) const {
  return head * plan_.k_blocks + plan_.sequences[sequence].k_block + block;
}

std::byte* BackwardRun::QueryGradient(int64_t sequence, int64_t head,
                                      int64_t split, int64_t block,
                                      uint8_t** touched) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  *touched = dq_touched_ + head * plan_.dq_blocks + s.dq_block +
             split * s.queries.count() + block;
  const int64_t row = (head - wave_begin_ * problem_.group()) * plan_.dq_rows +
                      s.dq_row + split * s.queries.padded() +
                      block * s.queries.size;
  return dq_ + engine_.query_accumulator_bytes(row, problem_.head_dim);
}

}  // namespace attention
}  // namespace fa2
