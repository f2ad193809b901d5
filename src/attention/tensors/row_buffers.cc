// SPDX-License-Identifier: Apache-2.0
#include "src/attention/tensors/row_buffers.h"

#include <algorithm>
#include <cstring>

#include "src/platform/caches.h"

namespace fa2::attention {
namespace {

// Copies rows element by element; `step` and `stride` in bytes.
void Gather(const char* from, int64_t stride, int64_t step, int64_t rows,
            int64_t depth, size_t element, char* to) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < depth; ++d, to += element) {
      memcpy(to, from + r * stride + d * step, element);
    }
  }
}

void Scatter(const char* from, int64_t stride, int64_t step, int64_t rows,
             int64_t depth, size_t element, char* to) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < depth; ++d, from += element) {
      memcpy(to + r * stride + d * step, from, element);
    }
  }
}

}  // namespace

TensorRows QueryTensorRows(const Problem& problem, const BlockRows& block) {
  const Sequence& s = problem.sequences[static_cast<size_t>(block.sequence)];
  return {s.batch, block.head, s.q_begin + block.begin(), block.size()};
}

TensorRows KeyTensorRows(const Problem& problem, const BlockRows& block) {
  const Sequence& s = problem.sequences[static_cast<size_t>(block.sequence)];
  return {s.batch, block.head, s.k_begin + block.begin(), block.size()};
}

void FinishRows(const simd::RowKernels& kernels, const Problem& problem,
                const TensorView& lse, int64_t sequence, int64_t head,
                Interval queries, void* max, const void* sum, void* weight) {
  if (queries.empty()) return;
  const ConstTensorView& sinks = problem.options.sinks;
  float sink = 0.0f;
  if (sinks.given()) memcpy(&sink, At(sinks, 0, head, 0), sizeof(sink));
  kernels.finish(max, sum, weight, queries.size(),
                 sinks.given() ? &sink : nullptr);
  if (!lse.given()) return;
  const RowStart start = StatisticsStart(problem, lse, sequence);
  const size_t element = SizeOf(lse.dtype);
  // The stride of a dimension of one element may be any number.
  const int64_t step =
      lse.sizes[2] > 1 ? lse.strides[2] * static_cast<int64_t>(element) : 0;
  Scatter(static_cast<const char*>(max), step, 0, queries.size(), 1, element,
          At(lse, start.batch, head, start.row + queries.begin));
}

// 4 MiB a core is twice an L2 (AMX, one thread: with 6 MiB of non-temporal
// stores the backward gains 4%, with 0.75 MiB it loses 2%, with 48 KiB 10%).
// Half of L3, as inputs want the other (Zen 5, 32 MiB, f32: with 25 MiB of
// non-temporal stores forward and backward gain 4 to 12%, with 12 MiB the
// forward loses 9 to 12%).
LeftCaches CachesLeft(std::initializer_list<ConstTensorView> outputs,
                      int workers) {
  constexpr int64_t kOfCore = 4 << 20;
  static const int64_t last_level =
      static_cast<int64_t>(platform::LastLevelCacheBytes());
  int64_t bytes = 0;
  for (const ConstTensorView& output : outputs) {
    if (!output.given()) continue;
    int64_t elements = 1;
    for (const int64_t size : output.sizes) elements *= size;
    bytes += elements * static_cast<int64_t>(SizeOf(output.dtype));
  }
  if (bytes < workers * kOfCore) return LeftCaches::kNone;
  return last_level > 0 && bytes >= last_level / 2 ? LeftCaches::kAll
                                                   : LeftCaches::kCores;
}

RowBuffers::RowBuffers(std::initializer_list<ConstTensorView> tensors,
                       LeftCaches left, const simd::Engine& engine,
                       const simd::RowKernels& kernels, int64_t largest_block,
                       threading::ScratchLayout* layout)
    : engine_(engine), kernels_(kernels), left_(left) {
  int64_t depth = 1;
  size_t copied_row = 0;  // bytes
  for (const ConstTensorView& tensor : tensors) {
    depth = std::max(depth, tensor.sizes[3]);
    if (!HasContiguousRows(tensor)) {
      copied_row = std::max(copied_row, static_cast<size_t>(tensor.sizes[3]) *
                                            SizeOf(tensor.dtype));
    }
  }
  for (std::byte*& gathered : gathered_) {
    gathered = layout->Take(static_cast<size_t>(largest_block) * copied_row);
  }
  rows_ = layout->Take(static_cast<size_t>(kUnpackRows * depth) *
                       SizeOf(engine.accumulator));
  narrowed_ = layout->Take(kUnpackRows * copied_row);
}

simd::Rows ContiguousRows(const ConstTensorView& view, const TensorRows& at,
                          void* gathered) {
  simd::Rows rows = RowsOf(view, at);
  if (HasContiguousRows(view)) return rows;
  const size_t element = SizeOf(view.dtype);
  const int64_t bytes = static_cast<int64_t>(element);
  Gather(static_cast<const char*>(rows.data), rows.stride * bytes,
         view.strides[3] * bytes, at.count, rows.depth, element,
         static_cast<char*>(gathered));
  rows.data = gathered;
  rows.stride = rows.depth;
  return rows;
}

void StoreRows(const simd::RowKernels& kernels, const void* rows,
               int64_t row_stride, const RowScale& scale, const StoredRows& to,
               void* narrowed) {
  const TensorView& out = to.tensor;
  const int64_t depth = out.sizes[3];
  const size_t element = SizeOf(out.dtype);
  const auto store = [&](void* data, int64_t stride, bool non_temporal) {
    kernels.store(rows, row_stride, to.rows.count, depth, scale.factor,
                  scale.row_factor, to.accumulate,
                  {data, out.dtype, stride, non_temporal});
  };
  if (depth == 0) return;
  char* const first = At(out, to.rows.batch, to.rows.head, to.rows.first);
  if (HasContiguousRows(out)) {
    store(first, out.strides[2], to.non_temporal);
    return;
  }
  const int64_t row_step =
      out.sizes[2] > 1 ? out.strides[2] * static_cast<int64_t>(element) : 0;
  const int64_t step = out.strides[3] * static_cast<int64_t>(element);
  char* const dense = static_cast<char*>(narrowed);
  if (to.accumulate) {
    Gather(first, row_step, step, to.rows.count, depth, element, dense);
  }
  store(dense, depth, false);
  Scatter(dense, row_step, step, to.rows.count, depth, element, first);
}

bool RowBuffers::StoreInOnePass(const AccumulatorSum& sum,
                                const RowScale& scale,
                                const StoredRows& to) const {
  const simd::Engine::StoreBf16 store = sum.kind == AccumulatorSum::Kind::kKeys
                                            ? engine_.store_key_rows
                                            : engine_.store_query_rows;
  if (sum.count == 0 || store == nullptr || to.accumulate ||
      to.tensor.dtype != DType::kBF16 || !HasContiguousRows(to.tensor)) {
    return false;
  }
  store(sum.partials, sum.count, to.tensor.sizes[3], to.rows.count,
        static_cast<float>(scale.factor), scale.row_factor,
        {At(to.tensor, to.rows.batch, to.rows.head, to.rows.first),
         to.tensor.dtype, to.tensor.strides[2], left_ != LeftCaches::kNone});
  return true;
}

void RowBuffers::Store(const AccumulatorSum& sum, const RowScale& scale,
                       const StoredRows& to) const {
  const TensorView& out = to.tensor;
  const int64_t depth = out.sizes[3];
  if (depth == 0) return;
  if (sum.count == 0 && to.accumulate) return;
  if (StoreInOnePass(sum, scale, to)) return;
  const bool keys = sum.kind == AccumulatorSum::Kind::kKeys;
  const auto unpack =
      keys ? engine_.unpack_key_rows : engine_.unpack_query_rows;
  const size_t wide = SizeOf(engine_.accumulator);
  void* const accumulator = sum.partials[0];
  if (sum.count == 0) {
    memset(rows_, 0, static_cast<size_t>(kUnpackRows * depth) * wide);
  }
  for (int i = 1; i < sum.count; ++i) {
    const size_t size = keys ? engine_.key_accumulator_bytes(sum.rows, depth)
                             : engine_.query_accumulator_bytes(sum.rows, depth);
    kernels_.add(accumulator, sum.partials[i],
                 static_cast<int64_t>(size / wide));
  }
  const int64_t stride =
      keys && sum.count != 0 && engine_.key_accumulator_stride != nullptr
          ? engine_.key_accumulator_stride(depth)
          : 0;
  for (int64_t r = 0; r < to.rows.count; r += kUnpackRows) {
    const int64_t rows = std::min(kUnpackRows, to.rows.count - r);
    const void* unpacked = rows_;
    if (stride != 0) {
      unpacked = static_cast<const char*>(accumulator) +
                 static_cast<size_t>(r * stride) * wide;
    } else if (sum.count != 0) {
      unpack(accumulator, sum.rows, depth, r, rows, rows_, depth);
    }
    RowScale of_rows = scale;
    if (scale.row_factor != nullptr) {
      of_rows.row_factor = static_cast<const char*>(scale.row_factor) +
                           static_cast<size_t>(r) * wide;
    }
    StoredRows part = to;
    part.rows.first += r;
    part.rows.count = rows;
    part.non_temporal = left_ == LeftCaches::kAll;
    StoreRows(kernels_, unpacked, stride != 0 ? stride : depth, of_rows, part,
              narrowed_);
  }
}

}  // namespace fa2::attention
