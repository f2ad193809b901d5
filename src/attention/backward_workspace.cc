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
                         int workers, Carver* carver)
    : args_(args),
      problem_(problem),
      plan_(plan),
      engine_(engine),
      row_kernels_(*simd::RowKernelsFor(engine.accumulator, targets)),
      staging_(*simd::StagingKernelsFor(engine.accumulator, targets)),
      bias_tiles_(problem, carver),
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
  k_score_ = packed(true, Role::kScoreLeft, k_rows, d);
  k_grad_ = packed(want_dq() && !engine.grad_left_is_score_left,
                   Role::kGradLeft, k_rows, d);
  v_score_ = packed(true, Role::kScoreLeft, k_rows, dv);
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
  const bool shared = plan.shared_key_gradients;
  dk_ = carver->Take(
      shared && want_dk() ? engine.key_accumulator_bytes(k_rows, d) : 0);
  dv_ = carver->Take(
      shared && want_dv() ? engine.key_accumulator_bytes(k_rows, dv) : 0);
  const size_t q_blocks = static_cast<size_t>(plan.q_blocks * problem.q_heads);
  const size_t k_blocks = static_cast<size_t>(plan.k_blocks * problem.kv_heads);
  dq_touched_ = carver->Take<uint8_t>(
      static_cast<size_t>(plan.dq_blocks * problem.q_heads));
  dkv_touched_ = carver->Take<uint8_t>(k_blocks);
  q_non_finite_ = carver->Take<uint8_t>(q_blocks);
  dout_non_finite_ = carver->Take<uint8_t>(q_blocks);
  k_non_finite_ = carver->Take<uint8_t>(k_blocks);
  dsink_terms_ = carver->Take<double>(args.dsinks.given() ? q_blocks : 0);
  dalibi_terms_ = carver->Take<double>(
      args.dalibi_slopes.given()
          ? static_cast<size_t>(plan.parts * problem.q_heads)
          : 0);
  workers_ = carver->Construct<Worker>(workers, *this);
}

BackwardRun::Worker::Worker(const BackwardRun& run, Carver* carver)
    : scores(run.problem_, run.engine_, run.staging_, run.bias_tiles_,
             run.plan_.blocks, run.block_dbias().given(),
             run.args_.dalibi_slopes.given(), carver),
      rows(run.problem_, run.engine_, run.row_kernels_,
           std::max(run.plan_.blocks.keys, run.plan_.blocks.queries), carver),
      bias(run.block_dbias(), run.args_.accumulate_dbias, run.problem_,
           run.engine_, run.staging_, run.row_kernels_, run.plan_.blocks,
           run.bias_rows_, carver) {
  const simd::Engine& engine = run.engine_;
  const int64_t keys = run.plan_.blocks.keys;
  const int64_t d = run.problem_.head_dim;
  const int64_t value_dim = run.problem_.value_dim;
  const bool own = !run.plan_.shared_key_gradients;
  engine_scratch =
      carver->Take(engine.scratch_bytes(run.plan_.blocks, d, value_dim));
  dk = carver->Take(own ? engine.key_accumulator_bytes(keys, d) : 0);
  dv = carver->Take(own ? engine.key_accumulator_bytes(keys, value_dim) : 0);
  key_sums_ds = carver->Take(
      SharesKeys(run.args_.dbias, run.problem_)
          ? static_cast<size_t>(keys * run.plan_.blocks.queries) * run.element()
          : 0);
  k_finite =
      carver->Take(run.want_dq() && engine.grad_left_is_score_left
                       ? engine.packed_bytes(simd::Role::kGradLeft, keys, d)
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

BackwardRun::KeyOperand BackwardRun::Keys(int64_t sequence, int64_t head,
                                          int64_t block) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  const int64_t row =
      (head - wave_begin_) * plan_.k_rows + s.k_row + block * s.keys.size;
  const int64_t d = problem_.head_dim;
  using simd::Role;
  std::byte* k_score =
      k_score_ + engine_.packed_bytes(Role::kScoreLeft, row, d);
  return {k_score,
          engine_.grad_left_is_score_left
              ? k_score
              : k_grad_ + engine_.packed_bytes(Role::kGradLeft, row, d),
          v_score_ +
              engine_.packed_bytes(Role::kScoreLeft, row, problem_.value_dim)};
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

std::byte* BackwardRun::KeyGradient(std::byte* base, int64_t depth,
                                    int64_t sequence, int64_t head,
                                    int64_t block) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  const int64_t row =
      (head - wave_begin_) * plan_.k_rows + s.k_row + block * s.keys.size;
  return base + engine_.key_accumulator_bytes(row, depth);
}

}  // namespace attention
}  // namespace fa2
