// SPDX-License-Identifier: Apache-2.0
#include "src/reference/sequences.h"

#include <algorithm>

#include "src/reference/tensor_access.h"

namespace fa2::reference {
namespace {

struct Place {
  int64_t batch;
  int64_t row;
};

Place StatisticPlace(const ConstTensorView& view, const Sequences& sequences,
                     const Sequence& sequence, int64_t i) {
  if (!sequences.packed) return {sequence.batch, i};
  // With a single sequence both forms place row i at i.
  const bool padded = view.sizes[0] != 1;
  if (padded) return {sequence.index, i};
  return {0, sequence.q_begin + i};
}

// Replaces the longest lengths, by which dropout counts, by those given.
void UseGivenExtents(const AttentionOptions& options, Sequences* sequences) {
  if (options.max_seqlen_q > 0) sequences->max_q = options.max_seqlen_q;
  if (options.max_seqlen_k > 0) sequences->max_k = options.max_seqlen_k;
}

}  // namespace

Sequences SequencesOf(const ConstTensorView& q, const ConstTensorView& k,
                      const AttentionOptions& options) {
  Sequences sequences;
  sequences.packed = options.cu_seqlens_q.given();
  if (!sequences.packed) {
    sequences.max_q = q.sizes[2];
    sequences.max_k = k.sizes[2];
    for (int64_t b = 0; b < q.sizes[0]; ++b) {
      sequences.list.push_back({b, b, 0, 0, q.sizes[2], k.sizes[2]});
    }
    UseGivenExtents(options, &sequences);
    return sequences;
  }
  const auto prefix = [](const ConstTensorView& cu, int64_t n) {
    return static_cast<int64_t>(Load(cu, 0, 0, 0, n));
  };
  const int64_t count = options.cu_seqlens_q.sizes[3] - 1;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t q_begin = prefix(options.cu_seqlens_q, n);
    const int64_t k_begin = prefix(options.cu_seqlens_k, n);
    const int64_t nq = prefix(options.cu_seqlens_q, n + 1) - q_begin;
    const int64_t nk = prefix(options.cu_seqlens_k, n + 1) - k_begin;
    sequences.list.push_back({n, 0, q_begin, k_begin, nq, nk});
    sequences.max_q = std::max(sequences.max_q, nq);
    sequences.max_k = std::max(sequences.max_k, nk);
  }
  UseGivenExtents(options, &sequences);
  return sequences;
}

double LoadStatistic(const ConstTensorView& view, const Sequences& sequences,
                     const Sequence& sequence, int64_t head, int64_t i) {
  const Place place = StatisticPlace(view, sequences, sequence, i);
  return Load(view, place.batch, head, place.row, 0);
}

void StoreStatistic(const TensorView& view, const Sequences& sequences,
                    const Sequence& sequence, int64_t head, int64_t i,
                    double value) {
  const Place place = StatisticPlace(view, sequences, sequence, i);
  Store(view, place.batch, head, place.row, 0, value);
}

}  // namespace fa2::reference
