// What the backward packs, once a head: Q and dO with the row statistics lse
// and delta, padded, before the items; K and V by the item of their block.
#include <cmath>
#include <cstring>
#include <limits>

#include "src/attention/backward/backward_run.h"

namespace fa2::attention {

bool BackwardRun::Pack(simd::Role score, const simd::Rows& rows, int64_t padded,
                       std::byte* packed_score, simd::Role grad, bool want_grad,
                       std::byte* packed_grad) const {
  const bool pair = want_grad && engine_.pack_pair != nullptr;
  const bool finite =
      pair ? engine_.pack_pair(score, grad, rows, padded, packed_score,
                               packed_grad)
           : engine_.pack(score, rows, padded, false, packed_score);
  if (want_grad && !(pair && finite)) {
    engine_.pack(grad, rows, padded, !finite, packed_grad);
  }
  return finite;
}

void BackwardRun::PackQueries(Worker* worker, int64_t sequence, int64_t head,
                              int64_t block) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  const Sequence& rows = problem_.sequences[sequence];
  const Interval queries = s.queries.Block(block);
  const int64_t padded = s.queries.Padded(queries);
  const int64_t flag = QueryFlag(sequence, head, block);
  const QueryOperand operand = Queries(*worker->place, sequence, head, block);
  using simd::Role;
  const auto pack = [&](const ConstTensorView& view, std::byte* score,
                        bool want_grad, std::byte* grad, uint8_t* non_finite) {
    const simd::Rows source = worker->rows.Read(
        view, rows.batch, head, rows.q_begin + queries.begin, queries.size());
    *non_finite = Pack(Role::kScoreRight, source, padded, score,
                       Role::kGradRight, want_grad, grad)
                      ? 0
                      : 1;
    return source;
  };
  alibi_reach_.SeeQueries(sequence, head, queries,
                          pack(problem_.q, operand.q_score, want_dk(),
                               operand.q_grad, q_non_finite_ + flag));
  pack(args_.dout, operand.dout_score, want_dv(), operand.dout_grad,
       dout_non_finite_ + flag);
  FindStatistics(worker, sequence, head, block, operand);
  alibi_reach_.BoundByStatistics(sequence, head, queries, operand.lse,
                                 operand.delta);
}

void BackwardRun::PackKeys(Worker* worker, int64_t sequence, int64_t head,
                           int64_t block) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  const Sequence& rows = problem_.sequences[sequence];
  const Interval keys = s.keys.Block(block);
  const int64_t padded = s.keys.Padded(keys);
  const KeyOperand operand = Keys(*worker, sequence, head, 0, block);
  using simd::Role;
  const auto read = [&](const ConstTensorView& view) {
    return worker->rows.Read(view, rows.batch, head, rows.k_begin + keys.begin,
                             keys.size());
  };
  const simd::Rows k = read(problem_.k);
  alibi_reach_.SeeKeys(sequence, head, keys, k);
  const bool finite =
      Pack(Role::kScoreLeft, k, padded, operand.k_score, Role::kGradLeft,
           want_dq() && !engine_.grad_left_is_score_left, operand.k_grad);
  k_non_finite_[KeyFlag(sequence, head, block)] = finite ? 0 : 1;
  engine_.pack(Role::kScoreLeft, read(problem_.v), padded, false,
               operand.v_score);
}

template <typename T>
void BackwardRun::FindStatisticsAs(Worker* worker, int64_t sequence,
                                   int64_t head, int64_t block,
                                   const QueryOperand& operand) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  const Sequence& rows = problem_.sequences[sequence];
  const Interval queries = s.queries.Block(block);
  const int64_t count = queries.size();
  const int64_t padded = s.queries.Padded(queries);
  T* lse = reinterpret_cast<T*>(operand.lse);
  T* delta = reinterpret_cast<T*>(operand.delta);
  // Calls take(i, value) for the block's rows of a statistic.
  const auto read = [&](const ConstTensorView& view, const auto& take) {
    const RowStart start = StatisticsStart(problem_, view, sequence);
    const char* at = At(view, start.batch, head, start.row + queries.begin);
    const int64_t step = view.strides[2] * static_cast<int64_t>(sizeof(T));
    for (int64_t i = 0; i < count; ++i, at += step) {
      T value;
      memcpy(&value, at, sizeof(value));
      take(i, value);
    }
  };
  if (args_.delta.given()) {
    read(args_.delta, [&](int64_t i, T value) { delta[i] = value; });
  } else {
    const int64_t first = rows.q_begin + queries.begin;
    row_kernels_.dot(
        worker->rows.Read(args_.out, rows.batch, head, first, count, 0),
        worker->rows.Read(args_.dout, rows.batch, head, first, count, 1),
        delta);
  }
  read(args_.lse, [&](int64_t i, T value) { lse[i] = value; });
  if (args_.dlse.given()) {
    read(args_.dlse, [&](int64_t i, T value) { delta[i] -= value; });
  }
  // Padding: exp(S - inf) is 0, and so is dS.
  for (int64_t i = count; i < padded; ++i) {
    lse[i] = std::numeric_limits<T>::infinity();
    delta[i] = T(0);
  }
  if (args_.dsinks.given()) {
    float sink;
    memcpy(&sink, At(problem_.options.sinks, 0, head, 0), sizeof(sink));
    for (int64_t i = 0; i < count; ++i) {
      // A row that sees no key leaves all its probability to the sink,
      // whatever its lse says.
      const bool sees_none = rows.mask.Keys(queries.begin + i).empty();
      const double p = sees_none ? 1.0
                                 : std::exp(static_cast<double>(sink) -
                                            static_cast<double>(lse[i]));
      dsink_terms_[SinkTerm(sequence, head, queries.begin + i)] -=
          p * static_cast<double>(delta[i]);
    }
  }
}

void BackwardRun::FindStatistics(Worker* worker, int64_t sequence, int64_t head,
                                 int64_t block,
                                 const QueryOperand& operand) const {
  if (engine_.accumulator == DType::kF64) {
    FindStatisticsAs<double>(worker, sequence, head, block, operand);
  } else {
    FindStatisticsAs<float>(worker, sequence, head, block, operand);
  }
}

}  // namespace fa2::attention
