// SPDX-License-Identifier: Apache-2.0

// A checked call: what AttentionForward and AttentionBackward work from.
#ifndef FA2_SRC_ATTENTION_CALL_PROBLEM_H_
#define FA2_SRC_ATTENTION_CALL_PROBLEM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "fa2/attention.h"
#include "fa2/status.h"
#include "src/attention/call/block_lists.h"
#include "src/attention/call/mask.h"
#include "src/simd/engine.h"

namespace fa2::attention {

// One sequence of queries against one of keys: an element of the batch, or a
// range of packed rows where lengths vary.
struct Sequence {
  int64_t batch = 0;    // index into the tensors' first dimension
  int64_t q_begin = 0;  // first row of the sequence in q and k
  int64_t k_begin = 0;
  Mask mask;
  double pairs = 0.0;  // visible ones of a query head, or the mean of all

  int64_t nq() const { return mask.nq(); }
  int64_t nk() const { return mask.nk(); }
};

// What forward and backward share, checked and normalised.
struct Problem {
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  bool variable_length = false;
  // lse, dlse and delta rows: [1, H, total, 1], or one batch a sequence.
  double scale = 1.0;
  double dropout_scale = 1.0;  // 1 / (1 - p); 0 for p = 1
  int64_t max_nq = 0;          // Mq and Mk of the dropout mapping
  int64_t max_nk = 0;
  ConstTensorView q, k, v;
  AttentionOptions options;
  std::vector<Sequence> sequences;
  BlockLists blocks;  // of options.block_mask

  // Query heads that share a head of K and V; 1 where there are no heads.
  int64_t group() const { return kv_heads == 0 ? 1 : q_heads / kv_heads; }
  // More keys than this no query sees.
  int64_t most_keys() const;
  // Rows of queries that share a head of keys: the most of a sequence.
  int64_t most_queries() const;
  // Visible ones of a query head, of all sequences.
  double pairs() const;
  // Those of a part of a sequence, the mean of these query heads.
  double Pairs(const Sequence& sequence, const Interval& heads,
               const Interval& queries, const Interval& keys) const;
  // Whether a block mask leaves anything of queries x keys of a sequence
  // visible, or of the keys to any query of the heads that share them.
  bool AnyListed(const Sequence& sequence, int64_t head,
                 const Interval& queries, const Interval& keys) const;
  bool AnyListed(const Sequence& sequence, int64_t kv_head,
                 const Interval& keys) const;
  // Whether a block mask lets the query heads see different keys.
  bool heads_differ() const { return blocks.given() && blocks.heads() > 1; }
  // f64 inputs are computed in f64, the rest in f32.
  DType accumulator() const {
    return q.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  }
};

// "B2 Hq4 Hkv2 Nq128 Nk128 D64 Dv64"; of packed sequences B counts the
// sequences, Nq and Nk all rows.
std::string ShapeOf(const Problem& problem);

// Check a call; on success fill `problem` (its vectors are reused).
Status CheckForward(const AttentionForwardArgs& args, Problem* problem);
Status CheckBackward(const AttentionBackwardArgs& args, Problem* problem);

// Rows [first, first + count) of a head of a [B, H, N, D] tensor.
struct TensorRows {
  int64_t batch = 0;
  int64_t head = 0;
  int64_t first = 0;
  int64_t count = 0;
};

// The last dimension must be contiguous.
simd::Rows RowsOf(const ConstTensorView& view, const TensorRows& at);

inline bool HasContiguousRows(const ConstTensorView& view) {
  return view.strides[3] == 1 || view.sizes[3] <= 1;
}

// Address of element (b, h, n, d).
inline const char* At(const ConstTensorView& view, int64_t b, int64_t h,
                      int64_t n, int64_t d = 0) {
  const int64_t offset = b * view.strides[0] + h * view.strides[1] +
                         n * view.strides[2] + d * view.strides[3];
  return static_cast<const char*>(view.data) +
         offset * static_cast<int64_t>(SizeOf(view.dtype));
}
inline char* At(const TensorView& view, int64_t b, int64_t h, int64_t n,
                int64_t d = 0) {
  return const_cast<char*>(At(ConstTensorView(view), b, h, n, d));
}

// Of a query head, where there are slopes.
double AlibiSlope(const Problem& problem, int64_t sequence, int64_t head);

// Where the row statistics (lse, dlse, delta) of a sequence start: by packed
// rows, or by a batch index of its own when they are padded.
struct RowStart {
  int64_t batch;
  int64_t row;
};
RowStart StatisticsStart(const Problem& problem, const ConstTensorView& view,
                         int64_t sequence);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_CALL_PROBLEM_H_
