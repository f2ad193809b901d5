// The end of the backward: partial sums in a fixed order, scaled, rounded once
// and stored in the caller's dtype.
#include <algorithm>
#include <array>
#include <cstring>

#include "src/attention/backward/backward_run.h"
#include "src/attention/scores/non_finite.h"

namespace fa2::attention {

void BackwardRun::StoreQueryGradient(Worker* worker, int64_t sequence,
                                     int64_t head, int64_t block) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  const Sequence& rows = problem_.sequences[sequence];
  const Interval queries = s.queries.Block(block);
  const int64_t padded = s.queries.Padded(queries);
  RowBuffers::Parts parts;
  for (int64_t split = 0; split < s.splits; ++split) {
    uint8_t* touched = nullptr;
    std::byte* partial =
        QueryGradient(*worker->place, sequence, head, split, block, &touched);
    if (*touched != 0) parts.Add(partial);
  }
  worker->rows.Store(parts, RowBuffers::Kind::kQueries, padded, queries.size(),
                     problem_.scale, nullptr, args_.accumulate_dq, args_.dq,
                     rows.batch, head, rows.q_begin + queries.begin);
}

void BackwardRun::JoinKeyGradients(Worker* worker, int64_t sequence,
                                   int64_t head, int64_t block) const {
  uint8_t& sum_touched = KeysTouched(sequence, head, 0, block);
  uint8_t& term_touched = KeysTouched(sequence, head, 1, block);
  if (term_touched == 0) return;
  const Blocks& blocks = plan_.sequences[sequence].keys;
  const int64_t rows = blocks.Padded(blocks.Block(block));
  const KeyOperand sum = Keys(*worker, sequence, head, 0, block);
  const KeyOperand term = Keys(*worker, sequence, head, 1, block);
  const auto join = [&](std::byte* to, const std::byte* from, int64_t depth) {
    const size_t bytes = engine_.key_accumulator_bytes(rows, depth);
    if (sum_touched == 0) {
      memcpy(to, from, bytes);
    } else {
      row_kernels_.add(to, from, static_cast<int64_t>(bytes / element()));
    }
  };
  if (want_dk()) join(sum.dk, term.dk, problem_.head_dim);
  if (want_dv()) join(sum.dv, term.dv, problem_.value_dim);
  sum_touched = 1;
  term_touched = 0;
}

void BackwardRun::StoreKeyGradients(Worker* worker, int64_t sequence,
                                    int64_t head, int64_t block) const {
  const BackwardSequence& s = plan_.sequences[sequence];
  const Sequence& rows = problem_.sequences[sequence];
  const Interval keys = s.keys.Block(block);
  RowBuffers::Parts dk, dv;
  for (int64_t slot = 0; slot < plan_.slots(); ++slot) {
    if (KeysTouched(sequence, head, slot, block) == 0) continue;
    const KeyOperand sums = Keys(*worker, sequence, head, slot, block);
    dk.Add(sums.dk);
    dv.Add(sums.dv);
  }
  const auto store = [&](const RowBuffers::Parts& parts, double scale,
                         bool accumulate, const TensorView& out) {
    worker->rows.Store(parts, RowBuffers::Kind::kKeys, s.keys.Padded(keys),
                       keys.size(), scale, nullptr, accumulate, out, rows.batch,
                       head, rows.k_begin + keys.begin);
  };
  if (want_dk()) store(dk, problem_.scale, args_.accumulate_dk, args_.dk);
  if (want_dv()) store(dv, 1.0, args_.accumulate_dv, args_.dv);
}

// A bias that broadcasts its keys: [B or 1, Hq or 1, Nq or 1, 1].
template <typename T>
void BackwardRun::StoreBiasRowSums() const {
  const TensorView& dbias = args_.dbias;
  const std::array<int64_t, 3> sizes = {problem_.q.sizes[0], problem_.q_heads,
                                        problem_.q.sizes[2]};
  // Elements of the gradient that one element of dbias sums.
  std::array<int64_t, 3> shared;
  for (size_t i = 0; i < 3; ++i) {
    shared[i] = dbias.sizes[i] == 1 ? sizes[i] : 1;
  }
  const auto term = [&](int64_t b, int64_t h, int64_t i) {
    const T* sums = reinterpret_cast<const T*>(bias_row_sums_);
    double sum = 0.0;
    for (int64_t split = 0; split < plan_.sequences[b].splits; ++split) {
      sum += static_cast<double>(sums[BiasRow(split, h, b) + i]);
    }
    return sum;
  };
  for (int64_t b = 0; b < dbias.sizes[0]; ++b) {
    for (int64_t h = 0; h < dbias.sizes[1]; ++h) {
      for (int64_t i = 0; i < dbias.sizes[2]; ++i) {
        double sum = 0.0;
        for (int64_t sb = 0; sb < shared[0]; ++sb) {
          for (int64_t sh = 0; sh < shared[1]; ++sh) {
            for (int64_t si = 0; si < shared[2]; ++si) {
              sum += term(b + sb, h + sh, i + si);
            }
          }
        }
        const T value = static_cast<T>(sum);
        row_kernels_.store(&value, 1, 1, 1, 1.0, nullptr,
                           args_.accumulate_dbias,
                           {At(dbias, b, h, i), dbias.dtype, 1});
      }
    }
  }
}

void BackwardRun::StoreSmallGradients() const {
  bias_rows_.Store(args_.dbias, args_.accumulate_dbias, row_kernels_);
  if (SharesKeys(args_.dbias, problem_)) {
    if (engine_.accumulator == DType::kF64) {
      StoreBiasRowSums<double>();
    } else {
      StoreBiasRowSums<float>();
    }
  }
  const auto store = [](const TensorView& out, int64_t b, int64_t h,
                        double value) {
    *reinterpret_cast<float*>(At(out, b, h, 0)) = static_cast<float>(value);
  };
  if (args_.dsinks.given()) {
    for (int64_t h = 0; h < problem_.q_heads; ++h) {
      double sum = 0.0;
      for (int64_t i = 0; i < SinkTerms(); ++i) {
        sum += dsink_terms_[h * SinkTerms() + i];
      }
      store(args_.dsinks, 0, h, sum);
    }
  }
  if (args_.dalibi_slopes.given()) {
    const bool per_sequence = args_.dalibi_slopes.sizes[0] != 1;
    for (int64_t h = 0; h < problem_.q_heads; ++h) {
      double sum = 0.0;
      for (size_t i = 0; i < plan_.sequences.size(); ++i) {
        const BackwardSequence& s = plan_.sequences[i];
        for (int64_t block = 0; block < s.keys.count(); ++block) {
          sum += dalibi_terms_[h * plan_.k_blocks + s.k_block + block];
        }
        if (per_sequence) {
          store(args_.dalibi_slopes, static_cast<int64_t>(i), h, sum);
          sum = 0.0;
        }
      }
      if (!per_sequence) store(args_.dalibi_slopes, 0, h, sum);
    }
  }
}

void BackwardRun::SpreadNonFinite(threading::Team& team) const {
  const auto any = [](const uint8_t* flags, int64_t count) {
    return std::any_of(flags, flags + count, [](uint8_t f) { return f != 0; });
  };
  const int64_t q_flags = plan_.q_blocks * problem_.q_heads;
  const int64_t k_flags = plan_.k_blocks * problem_.kv_heads;
  // A non-finite row of Q or dO reaches the dK or dV of every key it sees, one
  // of K the dQ of every query that sees it.
  if (want_dk() && any(q_non_finite_, q_flags)) {
    SpreadFromQueries(problem_, problem_.q, args_.dk, NonFinite::kBecomesNaN,
                      team);
  }
  if (want_dv() && any(dout_non_finite_, q_flags)) {
    SpreadFromQueries(problem_, args_.dout, args_.dv, NonFinite::kIsAdded,
                      team);
  }
  if (want_dq() && any(k_non_finite_, k_flags)) {
    SpreadFromKeys(problem_, problem_.k, args_.dq, NonFinite::kBecomesNaN,
                   team);
  }
}

}  // namespace fa2::attention
