// SPDX-License-Identifier: Apache-2.0
#include "src/attention/tensors/read_ahead.h"

#include <algorithm>

#include "src/attention/tensors/row_buffers.h"

namespace fa2::attention {
namespace {

constexpr int64_t kLine = 64;
// What fits an L2 of 1 MiB beside the block under way. Longer heads are
// computed for so long that their reading does not tell.
constexpr int64_t kMostBytes = 256 << 10;

}  // namespace

void ReadAhead::Begin(int64_t pairs) {
  pairs_ = pairs;
  bytes_ = 0;
  rows_ = {};
}

void ReadAhead::Add(const ConstTensorView& tensor, const TensorRows& at) {
  if (!tensor.given() || at.count <= 0 || !HasContiguousRows(tensor)) return;
  const simd::Rows rows = RowsOf(tensor, at);
  const int64_t element = static_cast<int64_t>(SizeOf(rows.dtype));
  simd::PrefetchRows ahead = {static_cast<const char*>(rows.data),
                              rows.stride * element, rows.rows,
                              rows.depth * element};
  const int64_t bytes = ahead.rows * ahead.bytes;
  if (bytes_ + bytes > kMostBytes) return;
  bytes_ += bytes;
  if (ahead.stride == ahead.bytes) {
    ahead = {ahead.data, kLine, CeilDiv(bytes, kLine), kLine};
  }
  rows_.Add(ahead);
}

void ReadAhead::AddHead(
    const Problem& problem, const HeadBatch* next,
    std::initializer_list<const ConstTensorView*> of_queries,
    std::initializer_list<const ConstTensorView*> of_keys, int64_t most_keys) {
  if (next == nullptr || next->sequences.size() != 1 ||
      next->kv_heads.size() != 1) {
    return;
  }
  const Sequence& s = problem.sequences[next->sequences.begin];
  const int64_t kv_head = next->kv_heads.begin;
  for (const ConstTensorView* tensor : of_keys) {
    Add(*tensor, {s.batch, kv_head, s.k_begin, std::min(s.nk(), most_keys)});
  }
  for (const ConstTensorView* tensor : of_queries) {
    for (int64_t g = 0; g < problem.group(); ++g) {
      Add(*tensor, {s.batch, kv_head * problem.group() + g, s.q_begin, s.nq()});
    }
  }
}

void ReadAhead::TakeShare(simd::PrefetchList* list) {
  if (pairs_ <= 0) return;
  for (int i = 0; i < rows_.count; ++i) {
    simd::PrefetchRows& left = rows_.rows[i];
    simd::PrefetchRows share = left;
    share.rows = CeilDiv(left.rows, pairs_);
    left.data += share.rows * left.stride;
    left.rows -= share.rows;
    list->Add(share);
  }
  --pairs_;
}

}  // namespace fa2::attention
