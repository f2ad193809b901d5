#include "src/attention/scores/bias_gradient.h"

#include <cstring>

namespace fa2::attention {

BiasGradientRows::BiasGradientRows(const TensorView& dbias,
                                   const Problem& problem,
                                   const simd::Engine& engine, Carver* carver) {
  if (!SharesQueries(dbias, problem)) return;
  bytes =
      static_cast<size_t>(dbias.sizes[0] * dbias.sizes[1] * dbias.sizes[3]) *
      SizeOf(engine.accumulator);
  data = carver->Take(bytes);
}

void BiasGradientRows::Store(const TensorView& dbias, bool add,
                             const simd::RowKernels& kernels) const {
  if (bytes == 0) return;
  const int64_t keys = dbias.sizes[3];
  const size_t row_bytes =
      bytes / static_cast<size_t>(dbias.sizes[0] * dbias.sizes[1]);
  for (int64_t b = 0; b < dbias.sizes[0]; ++b) {
    for (int64_t h = 0; h < dbias.sizes[1]; ++h) {
      const std::byte* row = data + (b * dbias.sizes[1] + h) * row_bytes;
      // A row a key: the keys of dbias may lie at any stride.
      kernels.store(row, 1, keys, 1, 1.0, nullptr, add,
                    {At(dbias, b, h, 0), dbias.dtype, dbias.strides[3]});
    }
  }
}

BiasGradient::BiasGradient(const TensorView& dbias, bool add,
                           const Problem& problem, const simd::Engine& engine,
                           const simd::StagingKernels& staging,
                           const simd::RowKernels& kernels,
                           const simd::BlockSizes& largest,
                           const BiasGradientRows& rows, Carver* carver)
    : dbias_(dbias),
      add_(add),
      problem_(problem),
      engine_(engine),
      staging_(staging),
      kernels_(kernels),
      rows_(rows) {
  if (!dbias.given()) return;
  const size_t block = static_cast<size_t>(largest.queries) *
                       static_cast<size_t>(largest.keys) *
                       SizeOf(engine.accumulator);
  sum_ = carver->Take(block);
  term_ = carver->Take(block);
}

void BiasGradient::Collect(const simd::StagedShape& shape, bool hidden) {
  if (hidden) return;
  if (!empty_) kernels_.add(sum_, term_, shape.elements());
  empty_ = false;
}

simd::ScoreMatrix BiasGradient::Elements(const BlockPlace& place) const {
  return MatrixOf(dbias_, problem_.sequences[place.sequence].batch, place.head,
                  place.queries.begin, place.keys.begin);
}

simd::ScoreStream BiasGradient::Stream(const BlockPlace& place) const {
  return {&staging_, Elements(place), place.queries.size(), place.keys.size(),
          add_};
}

void BiasGradient::Finish(const BlockPlace& place,
                          const simd::StagedShape& shape) {
  const size_t element = SizeOf(engine_.accumulator);
  if (rows_.bytes != 0) {
    if (!empty_) {
      const int64_t batch = problem_.sequences[place.sequence].batch;
      const int64_t row = (dbias_.sizes[0] == 1 ? 0 : batch) * dbias_.sizes[1] +
                          (dbias_.sizes[1] == 1 ? 0 : place.head);
      staging_.sum_queries(
          sum_, shape,
          rows_.data +
              static_cast<size_t>(row * dbias_.sizes[3] + place.keys.begin) *
                  element);
    }
    empty_ = true;
    return;
  }
  if (empty_) {
    if (add_) return;
    memset(sum_, 0, static_cast<size_t>(shape.elements()) * element);
  }
  empty_ = true;
  staging_.unstage(sum_, shape, add_, Elements(place));
}

}  // namespace fa2::attention
