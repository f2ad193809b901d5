#include "src/attention/tensors/row_buffers.h"

#include <algorithm>
#include <cstring>

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

bool LeaveCaches(std::initializer_list<ConstTensorView> outputs, int workers) {
  int64_t bytes = 0;
  for (const ConstTensorView& output : outputs) {
    if (!output.given()) continue;
    int64_t elements = 1;
    for (const int64_t size : output.sizes) elements *= size;
    bytes += elements * static_cast<int64_t>(SizeOf(output.dtype));
  }
  return bytes >= int64_t{workers} * (4 << 20);
}

RowBuffers::RowBuffers(std::initializer_list<ConstTensorView> tensors,
                       bool non_temporal, const simd::Engine& engine,
                       const simd::RowKernels& kernels, int64_t largest_block,
                       Carver* carver)
    : engine_(engine), kernels_(kernels), non_temporal_(non_temporal) {
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
    gathered = carver->Take(static_cast<size_t>(largest_block) * copied_row);
  }
  rows_ = carver->Take(static_cast<size_t>(kUnpackRows * depth) *
                       SizeOf(engine.accumulator));
  narrowed_ = carver->Take(kUnpackRows * copied_row);
}

simd::Rows ContiguousRows(const ConstTensorView& view, int64_t batch,
                          int64_t head, int64_t first, int64_t count,
                          void* gathered) {
  simd::Rows rows = RowsOf(view, batch, head, first, count);
  if (HasContiguousRows(view)) return rows;
  const size_t element = SizeOf(view.dtype);
  const int64_t bytes = static_cast<int64_t>(element);
  Gather(static_cast<const char*>(rows.data), rows.stride * bytes,
         view.strides[3] * bytes, count, rows.depth, element,
         static_cast<char*>(gathered));
  rows.data = gathered;
  rows.stride = rows.depth;
  return rows;
}

void RowBuffers::Store(const Parts& parts, Kind kind, int64_t block_rows,
                       int64_t count, double factor, const void* row_factor,
                       bool add, const TensorView& out, int64_t batch,
                       int64_t head, int64_t first) const {
  const int64_t depth = out.sizes[3];
  if (depth == 0) return;
  void* const accumulator = parts.data[0];
  if (accumulator == nullptr && add) return;
  const size_t wide = SizeOf(engine_.accumulator);
  const size_t element = SizeOf(out.dtype);
  const int64_t bytes = static_cast<int64_t>(element);
  const bool contiguous = HasContiguousRows(out);
  const bool keys = kind == Kind::kKeys;
  const simd::Engine::StoreBf16 store =
      keys ? engine_.store_key_rows : engine_.store_query_rows;
  if (accumulator != nullptr && store != nullptr && contiguous && !add &&
      out.dtype == DType::kBF16) {
    store(parts.data, parts.count, depth, count, static_cast<float>(factor),
          row_factor,
          {At(out, batch, head, first), out.dtype, out.strides[2],
           non_temporal_});
    return;
  }
  const auto unpack =
      keys ? engine_.unpack_key_rows : engine_.unpack_query_rows;
  if (accumulator == nullptr) {
    memset(rows_, 0, static_cast<size_t>(kUnpackRows * depth) * wide);
  }
  for (int i = 1; i < parts.count; ++i) {
    const size_t size =
        keys ? engine_.key_accumulator_bytes(block_rows, depth)
             : engine_.query_accumulator_bytes(block_rows, depth);
    kernels_.add(accumulator, parts.data[i], static_cast<int64_t>(size / wide));
  }
  for (int64_t r = 0; r < count; r += kUnpackRows) {
    const int64_t rows = std::min(kUnpackRows, count - r);
    if (accumulator != nullptr) {
      unpack(accumulator, block_rows, depth, r, rows, rows_, depth);
    }
    const void* factors = row_factor == nullptr
                              ? nullptr
                              : static_cast<const char*>(row_factor) + r * wide;
    char* to = At(out, batch, head, first + r);
    if (contiguous) {
      kernels_.store(rows_, depth, rows, depth, factor, factors, add,
                     {to, out.dtype, out.strides[2]});
    } else {
      char* narrowed = reinterpret_cast<char*>(narrowed_);
      if (add) {
        Gather(to, out.strides[2] * bytes, out.strides[3] * bytes, rows, depth,
               element, narrowed);
      }
      kernels_.store(rows_, depth, rows, depth, factor, factors, add,
                     {narrowed, out.dtype, depth});
      Scatter(narrowed, out.strides[2] * bytes, out.strides[3] * bytes, rows,
              depth, element, to);
    }
  }
}

}  // namespace fa2::attention
