// SPDX-License-Identifier: Apache-2.0

// Bias and dS on their way between the caller's layout and the fused passes of
// the AMX engines: 32 x 32 elements at a time, through 4 KiB in L1.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_STREAM_INL_H_
#define FA2_SRC_SIMD_AMX_STREAM_INL_H_

#include <algorithm>
#include <cmath>

#include "src/simd/amx/layout.h"
#include "src/simd/amx/tile-inl.h"
#include "src/simd/amx/transpose-inl.h"
#include "src/simd/engine.h"
#include "src/simd/math/prefetch-inl.h"
#include "src/simd/rowwise/staging.h"

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

// Prefetches the rows of a stream a few lines at a time, between tile products.
// All of 32 x 32 at once they would take all of L1's fill buffers, for which
// the tile loads then wait (900 cycles); and rows are most often pages apart,
// more of them than the first-level TLB holds, so that each visit costs too.
class StreamFetch {
 public:
  // `keys` x `queries` panels from panel (key, query) on, row after row of
  // `width` of the key panels.
  void Begin(const ScoreStream& s, int64_t key, int64_t keys, int64_t width,
             int64_t query, int64_t queries) {
    left_ = 0;
    if (!s.given() || s.matrix.key_stride != 1) return;
    const int64_t size = static_cast<int64_t>(SizeOf(s.matrix.dtype));
    rows_ = std::min(32 * queries, s.queries - 32 * query);
    const int64_t bytes = std::min(32 * keys, s.keys - 32 * key) * size;
    if (rows_ <= 0 || bytes <= 0) return;
    stride_ = s.matrix.query_stride * size;
    if (stride_ == 0) rows_ = 1;
    chunk_ = 32 * width * size;
    at_ = static_cast<const char*>(s.matrix.data) + 32 * query * stride_ +
          32 * key * size;
    row_ = 0;
    left_ = rows_ * ((bytes + chunk_ - 1) / chunk_);
  }
  HWY_INLINE void Step() {
    if (left_ == 0) return;
    --left_;
    PrefetchL2(at_);
    PrefetchL2(at_ + chunk_ - 1);
    if (chunk_ > 128) {
      // Four lines, if a row begins with one; without a loop, since this stands
      // in the code in many places.
      PrefetchL2(at_ + 85);
      PrefetchL2(at_ + 170);
    }
    at_ += stride_;
    if (++row_ == rows_) {
      row_ = 0;
      at_ += chunk_ - rows_ * stride_;
    }
  }
  void Finish() {
    while (left_ > 0) Step();
  }

 private:
  const char* at_ = nullptr;
  int64_t stride_ = 0;  // bytes
  int64_t chunk_ = 0;   // bytes of a row that are prefetched at once
  int64_t rows_ = 0;
  int64_t row_ = 0;
  int64_t left_ = 0;
};

// No padding, and keys side by side.
HWY_INLINE bool IsWhole(const StreamPart& p) {
  return p.matrix.key_stride == 1 && p.shape.queries == 32 &&
         p.shape.keys == 32;
}
// The same in f32: no conversion.
HWY_INLINE bool IsPlain(const StreamPart& p) {
  return p.matrix.dtype == DType::kF32 && IsWhole(p);
}

// The first `count` of 16 elements as f32; the others are not read.
HWY_INLINE Floats LoadFirst(const float* row, size_t count) {
  const FloatTag d;
  return hn::MaskedLoad(hn::FirstN(d, count), d, row);
}
template <class Element>  // of 16 bits
HWY_INLINE Floats LoadFirst(const Element* row, size_t count) {
  const hn::FixedTag<uint16_t, 16> d;
  const auto bits = hn::MaskedLoad(hn::FirstN(d, count), d,
                                   reinterpret_cast<const uint16_t*>(row));
  return hn::PromoteTo(FloatTag(),
                       hn::BitCast(hn::FixedTag<Element, 16>(), bits));
}

// A part whose keys lie side by side, transposed, with -inf for padding.
template <class Element>
HWY_INLINE void TakeRows(const StreamPart& p, float* staged) {
  for (int64_t i = 0; i < 32; i += 16) {
    for (int64_t j = 0; j < 32; j += 16) {
      const int64_t keys = std::clamp<int64_t>(p.shape.keys - j, 0, 16);
      Floats r[16];
      for (int64_t q = 0; q < 16; ++q) {
        const Element* const row = static_cast<const Element*>(p.matrix.data) +
                                   (i + q) * p.matrix.query_stride + j;
        const auto count =
            static_cast<size_t>(i + q < p.shape.queries ? keys : 0);
        const FloatTag d;
        r[q] = hn::IfThenElse(hn::FirstN(d, count), LoadFirst(row, count),
                              hn::Set(d, -HUGE_VALF));
      }
      Transpose16x16(r);
      for (int64_t c = 0; c < 16; ++c) {
        StoreRow(r[c], staged + 32 * (j + c) + i);
      }
    }
  }
}

HWY_INLINE void TakePart(const ScoreStream& s, int64_t key, int64_t query,
                         float* staged) {
  const StreamPart p(s, key, query);
  const bool by_rows = p.matrix.key_stride == 1;
  if (IsPlain(p)) {
    const float* in = static_cast<const float*>(p.matrix.data);
    for (int i = 0; i < 32; i += 16) {
      for (int j = 0; j < 32; j += 16) {
        Floats v[16];
        LoadColumns(in + i * p.matrix.query_stride + j,
                    4 * p.matrix.query_stride, v);
        for (int c = 0; c < 16; ++c) {
          StoreRow(v[c], staged + 32 * (j + c) + i);
        }
      }
    }
  } else if (by_rows && p.matrix.dtype == DType::kBF16) {
    TakeRows<hwy::bfloat16_t>(p, staged);
  } else if (by_rows && p.matrix.dtype == DType::kF16) {
    TakeRows<hwy::float16_t>(p, staged);
  } else if (by_rows && p.matrix.dtype == DType::kF32) {
    TakeRows<float>(p, staged);
  } else {
    s.staging->stage_bias(p.matrix, p.shape, staged);
  }
}

// Whole lines are written by non-temporal stores: they need not be read first.
HWY_INLINE void StoreLine(Floats x, bool whole, float* to) {
  if (whole) {
    hn::Stream(x, FloatTag(), to);
  } else {
    hn::StoreU(x, FloatTag(), to);
  }
}

// Whether GivePairs will do: what is given is what the products take.
HWY_INLINE bool TakesPairs(const ScoreStream& s, int64_t key, int64_t query) {
  const StreamPart p(s, key, query);
  return !s.add && IsWhole(p) && p.matrix.dtype == DType::kBF16;
}

// From dS as right operand, rows of key pairs `row_bytes` apart.
HWY_INLINE void GivePairs(const ScoreStream& s, int64_t key, int64_t query,
                          const uint8_t* pairs, int64_t row_bytes) {
  const StreamPart p(s, key, query);
  uint16_t* const out =
      static_cast<uint16_t*>(const_cast<void*>(p.matrix.data));
  const int64_t stride = p.matrix.query_stride;
  const bool lines =
      reinterpret_cast<uintptr_t>(out) % 64 == 0 && stride % 32 == 0;
  for (int64_t half = 0; half < 2; ++half) {
    Floats v[16];
    LoadColumns(pairs + 64 * half, row_bytes, v);
    for (int c = 0; c < 16; ++c) {
      StoreLine(
          v[c], lines,
          reinterpret_cast<float*>(out + amx::QueryOfLane(half, c) * stride));
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
  float* const out = static_cast<float*>(const_cast<void*>(p.matrix.data));
  const int64_t stride = p.matrix.query_stride;
  const bool lines =
      reinterpret_cast<uintptr_t>(out) % 64 == 0 && stride % 16 == 0;
  for (int i = 0; i < 32; i += 16) {
    for (int j = 0; j < 32; j += 16) {
      Floats v[16];
      LoadColumns(staged + 32 * j + i, 4 * 32, v);
      for (int c = 0; c < 16; ++c) {
        StoreLine(v[c], lines, out + (i + c) * stride + j);
      }
    }
  }
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_STREAM_INL_H_
