// Bias and dS on their way between the caller's layout and the fused passes of
// the AMX engines: 32 x 32 elements at a time, through 4 KiB in L1.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_STREAM_INL_H_
#define FA2_SRC_SIMD_AMX_STREAM_INL_H_

#include <algorithm>

#include "src/simd/amx_tile-inl.h"
#include "src/simd/engine.h"
#include "src/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

inline constexpr int64_t kStreamElements = 32 * 32;

// Sub-block (key, query), both in panels, of a stream.
struct StreamPart {
  StreamPart(const ScoreStream& s, int64_t key, int64_t query)
      : matrix(s.matrix) {
    const int64_t offset =
        32 * (query * matrix.query_stride + key * matrix.key_stride) *
        static_cast<int64_t>(SizeOf(matrix.dtype));
    matrix.data = static_cast<const uint8_t*>(matrix.data) + offset;
    shape.queries = std::clamp<int64_t>(s.queries - 32 * query, 0, 32);
    shape.keys = std::clamp<int64_t>(s.keys - 32 * key, 0, 32);
    shape.padded_queries = shape.padded_keys = shape.panel = 32;
  }
  ScoreMatrix matrix;
  StagedShape shape;
};

// Asks for the lines of a part, to be read or, with kWrite, written.
template <bool kWrite>
HWY_INLINE void FetchPart(const ScoreStream& s, int64_t key, int64_t query) {
  const StreamPart p(s, key, query);
  if (p.matrix.key_stride != 1 || p.shape.keys == 0) return;
  const int64_t size = static_cast<int64_t>(SizeOf(p.matrix.dtype));
  const uint8_t* row = static_cast<const uint8_t*>(p.matrix.data);
  // 32 elements of 4 bytes may touch three lines; the middle one comes with
  // the first.
  const int64_t last = p.shape.keys * size - 1;
  for (int64_t i = 0; i < p.shape.queries; ++i) {
    if (kWrite) {
      asm volatile("prefetchw %0" : : "m"(row[0]));
      asm volatile("prefetchw %0" : : "m"(row[last]));
    } else {
      _mm_prefetch(reinterpret_cast<const char*>(row), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(row + last), _MM_HINT_T0);
    }
    row += p.matrix.query_stride * size;
  }
}

// Whole parts in f32 with keys side by side: no padding, no conversion.
HWY_INLINE bool IsPlain(const StreamPart& p) {
  return p.matrix.dtype == DType::kF32 && p.matrix.key_stride == 1 &&
         p.shape.queries == 32 && p.shape.keys == 32;
}

HWY_INLINE void TakePart(const ScoreStream& s, int64_t key, int64_t query,
                         float* staged) {
  const StreamPart p(s, key, query);
  if (!IsPlain(p)) {
    s.staging->stage_bias(p.matrix, p.shape, staged);
    return;
  }
  const float* in = static_cast<const float*>(p.matrix.data);
  // Each line is read once: rows a multiple of 4 KiB apart share a set of L1.
  alignas(64) float rows[kStreamElements];
  for (int i = 0; i < 32; ++i, in += p.matrix.query_stride) {
    _mm512_store_ps(rows + 32 * i, _mm512_loadu_ps(in));
    _mm512_store_ps(rows + 32 * i + 16, _mm512_loadu_ps(in + 16));
  }
  for (int i = 0; i < 32; i += 16) {
    for (int j = 0; j < 32; j += 16) {
      TransposeSquare(rows + 32 * i + j, 32, staged + 32 * j + i, 32);
    }
  }
}

HWY_INLINE void GivePart(const ScoreStream& s, int64_t key, int64_t query,
                         const float* staged) {
  const StreamPart p(s, key, query);
  if (!IsPlain(p) || s.add) {
    s.staging->unstage(staged, p.shape, s.add, p.matrix);
    return;
  }
  float* out = static_cast<float*>(const_cast<void*>(p.matrix.data));
  const int64_t stride = p.matrix.query_stride;
  for (int i = 0; i < 32; i += 16) {
    for (int j = 0; j < 32; j += 16) {
      TransposeSquare(staged + 32 * j + i, 32, out + i * stride + j, stride);
    }
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_STREAM_INL_H_
