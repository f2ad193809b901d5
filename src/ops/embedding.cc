// SPDX-License-Identifier: Apache-2.0

// Gradient of an embedding table. Positions are sorted by id (stably, so that
// sums have one order); each id's row then belongs to one item, which sums in
// f32 (f64 for f64) and rounds once. An id that fills the whole batch still
// spreads over the cores, by columns.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "fa2/training_ops.h"
#include "src/ops/arguments.h"
#include "src/ops/call.h"
#include "src/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/embedding.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "src/ops/load-inl.h"

#ifndef FA2_SRC_OPS_EMBEDDING_ONCE_
#define FA2_SRC_OPS_EMBEDDING_ONCE_
namespace fa2::ops {

// Columns of an item: 4 KiB of f32 sums (8 KiB of f64), which stay in L1.
inline constexpr int64_t kEmbeddingColumns = 1024;
// Sorted positions of an item.
inline constexpr int64_t kEmbeddingTokens = 64;

struct EmbeddingJob {
  RowArray dy, dweight;
  ConstTensorView ids;
  const int64_t* order = nullptr;  // positions sorted by id
  int64_t tokens = 0;
  int64_t dim = 0;
  int64_t column_items = 0;
  bool accumulate = false;
  bool stream = false;  // by non-temporal stores
  DType dtype = DType::kF32;
  DType dweight_dtype = DType::kF32;  // dtype or f32
};

}  // namespace fa2::ops
#endif  // FA2_SRC_OPS_EMBEDDING_ONCE_

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {

template <typename T>
HWY_INLINE void AddColumns(const T* HWY_RESTRICT from,
                           const T* HWY_RESTRICT later, size_t n, bool first,
                           Computed<T>* HWY_RESTRICT sums) {
  const hn::ScalableTag<Computed<T>> d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    PrefetchToL2(later + i);
    const auto v = LoadUpTo(d, from + i, n - i);
    hn::Store(first ? v : hn::Add(hn::Load(d, sums + i), v), d, sums + i);
  }
}

template <typename T, typename W>
void AddTokensOf(const EmbeddingJob& job, int64_t item) {
  const hn::ScalableTag<Computed<T>> d;
  HWY_ALIGN Computed<T> sums[kEmbeddingColumns + hn::MaxLanes(d)];
  const int64_t column = item % job.column_items * kEmbeddingColumns;
  const auto n =
      static_cast<size_t>(std::min(kEmbeddingColumns, job.dim - column));
  int64_t at = item / job.column_items * kEmbeddingTokens;
  const int64_t end = std::min(job.tokens, at + kEmbeddingTokens);
  const auto id_at = [&job](int64_t i) {
    return IndexAt(job.ids, job.order[i]);
  };
  // Ids that begin in this item are its own, to their last position; one that
  // began before belongs to an earlier item.
  if (at > 0) {
    const int64_t before = id_at(at - 1);
    while (at < end && id_at(at) == before) ++at;
  }
  while (at < end) {
    const int64_t id = id_at(at);
    for (bool first = true; at < job.tokens && id_at(at) == id; ++at) {
      // Sorted positions jump about in dy: fetch the next but one.
      const int64_t later = job.order[std::min(at + 2, job.tokens - 1)];
      AddColumns(job.dy.In<T>(job.order[at]) + column,
                 job.dy.In<T>(later) + column, n, first, sums);
      first = false;
    }
    W* HWY_RESTRICT to = job.dweight.Out<W>(id) + column;
    if (job.accumulate) {
      WriteRow(d, to, n, /*stream=*/false, [&](size_t i, size_t left) HWY_ATTR {
        return hn::Add(LoadUpTo(d, to + i, left), hn::LoadU(d, sums + i));
      });
    } else {
      WriteRow(d, to, n, job.stream, [&](size_t i, size_t) HWY_ATTR {
        return hn::LoadU(d, sums + i);
      });
    }
  }
  hwy::FlushStream();
}

void AddTokens(const EmbeddingJob& job, int64_t item) {
  WithElements(job.dtype, job.dweight_dtype, [&](auto dy, auto dweight) {
    AddTokensOf<decltype(dy), decltype(dweight)>(job, item);
  });
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/simd/target.h"

namespace fa2 {
namespace ops {
namespace {

HWY_EXPORT(AddTokens);

// Stable radix sort of positions by id, least significant digit first; `order`
// and `other` hold `tokens` positions each. Returns the one that is sorted.
const int64_t* SortByIndex(const ConstTensorView& ids, int64_t limit,
                           int64_t* order, int64_t* other) {
  constexpr int kBits = 11;  // 2,048 counters of 8 bytes: a third of L1
  const int64_t tokens = ids.sizes[3];
  for (int64_t i = 0; i < tokens; ++i) order[i] = i;
  for (int shift = 0; shift < 63 && (limit - 1) >> shift != 0; shift += kBits) {
    std::array<int64_t, 1 << kBits> begin{};
    const auto digit = [&ids, shift](int64_t position) {
      return static_cast<size_t>(IndexAt(ids, position) >> shift) &
             ((1 << kBits) - 1);
    };
    for (int64_t i = 0; i < tokens; ++i) ++begin[digit(i)];
    int64_t sum = 0;
    for (int64_t& b : begin) sum += std::exchange(b, sum);
    for (int64_t i = 0; i < tokens; ++i) {
      other[begin[digit(order[i])]++] = order[i];
    }
    std::swap(order, other);
  }
  return order;
}

Status CheckEmbedding(const EmbeddingBackwardArgs& args) {
  const NamedView dy{"dy", args.dy};
  const NamedView ids{"ids", args.ids};
  const NamedView dweight{"dweight", args.dweight};
  const auto& sizes = dweight.view.sizes;
  FA2_RETURN_IF_ERROR(CheckRows(dy, kFloats));
  FA2_RETURN_IF_ERROR(
      CheckVector(ids, {DType::kI32, DType::kI64}, RowCount(args.dy)));
  FA2_RETURN_IF_ERROR(CheckRows(dweight, kFloats));
  if (dweight.view.dtype != DType::kF32) {
    FA2_RETURN_IF_ERROR(CheckType(dweight, dy));
  }
  FA2_RETURN_IF_ERROR(CheckShape(dweight, {1, 1, sizes[2], args.dy.sizes[3]},
                                 "one row of dy's last size for every id"));
  FA2_RETURN_IF_ERROR(CheckOverlap({dweight}, {dy, ids}));
  int64_t counted = 0;
  return CheckIndices(ids, sizes[2], "the rows of dweight", std::nullopt,
                      &counted);
}

// Zeros in the rows that no id names.
void ClearUnnamedRows(const Context& context, const EmbeddingJob& job,
                      const ConstTensorView& shape) {
  const size_t row_bytes =
      static_cast<size_t>(shape.sizes[3]) * SizeOf(shape.dtype);
  ForRows(context, shape.sizes[2], RowsPerItem(shape.sizes[3], shape.dtype),
          [&job, row_bytes](RowRange range, int64_t /*item*/, int /*worker*/) {
            const int64_t* const end = job.order + job.tokens;
            const int64_t* at =
                std::lower_bound(job.order, end, range.begin,
                                 [&job](int64_t position, int64_t id) {
                                   return IndexAt(job.ids, position) < id;
                                 });
            for (int64_t row = range.begin; row < range.end; ++row) {
              const int64_t* const first = at;
              while (at != end && IndexAt(job.ids, *at) == row) ++at;
              if (at == first) {
                std::memset(job.dweight.Out<std::byte>(row), 0, row_bytes);
              }
            }
          });
}

Status Run(const EmbeddingBackwardArgs& args, Context& context) {
  FA2_RETURN_IF_ERROR(CheckEmbedding(args));
  const ConstTensorView& dy = args.dy;
  const ConstTensorView dweight = args.dweight;
  EmbeddingJob job;
  job.dy = RowArray(dy);
  job.dweight = RowArray(dweight);
  job.ids = args.ids;
  job.tokens = args.ids.sizes[3];
  job.dim = dy.sizes[3];
  job.column_items = CeilDiv(job.dim, kEmbeddingColumns);
  job.accumulate = args.accumulate_dweight;
  job.stream = WriteNonTemporal(Elements(dy) *
                                static_cast<int64_t>(SizeOf(dweight.dtype)));
  job.dtype = dy.dtype;
  job.dweight_dtype = dweight.dtype;

  threading::Workspace workspace;
  const auto tokens = static_cast<size_t>(job.tokens);
  if (tokens > 0 && job.dim > 0) {
    FA2_RETURN_IF_ERROR(context.impl().workspaces().Acquire(
        2 * tokens * sizeof(int64_t), &workspace));
    auto* const order = reinterpret_cast<int64_t*>(workspace.data());
    job.order = SortByIndex(args.ids, dweight.sizes[2], order, order + tokens);
  }
  if (!job.accumulate && Elements(dweight) > 0) {
    ClearUnnamedRows(context, job, dweight);
  }
  if (job.order == nullptr) return Status::Ok();
  const auto kernel = FA2_TARGET_FUNCTION(AddTokens, context.impl().targets());
  context.impl().pool().For(
      CeilDiv(job.tokens, kEmbeddingTokens) * job.column_items,
      [kernel, &job](int64_t item, int /*worker*/) { kernel(job, item); });
  return Status::Ok();
}

}  // namespace
}  // namespace ops

Status EmbeddingBackward(const EmbeddingBackwardArgs& args, Context* given) {
  return ops::Call("embedding_backward", args.dy, given,
                   [&](Context& context) { return ops::Run(args, context); });
}

}  // namespace fa2
#endif  // HWY_ONCE
