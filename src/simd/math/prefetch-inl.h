// SPDX-License-Identifier: Apache-2.0

// Prefetches of what is read later.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_MATH_PREFETCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_MATH_PREFETCH_INL_H_
#undef FA2_SRC_SIMD_MATH_PREFETCH_INL_H_
#else
#define FA2_SRC_SIMD_MATH_PREFETCH_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "src/simd/score_types.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

// Into L2, past L1, which the operands in use fill.
HWY_INLINE void PrefetchL2(const void* p) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  __builtin_prefetch(p, 0, 2);
#else
  hwy::Prefetch(p);
#endif
}

// Prefetches rows a few lines a step. All at once they would wait for one
// another: a core has some 24 lines under way (Bf16Dot with a bias, forward, D
// 128: 30.4 -> 26.0 ms).
class LinesAhead {
 public:
  // Within so many steps, or one.
  LinesAhead(const PrefetchList& list, int64_t steps)
      : next_(list.rows), end_(list.rows + list.count) {
    int64_t lines = 0;
    for (const PrefetchRows* r = next_; r != end_; ++r) {
      lines += r->rows * ((r->bytes + kLine - 1) / kLine);
    }
    steps = std::max<int64_t>(1, steps);
    lines_ = (lines + steps - 1) / steps;
  }

  HWY_INLINE void Step() {
    if (lines_ > 0) PrefetchLines();
  }

 private:
  static constexpr int64_t kLine = 64;

  // Where it is stays in registers: in memory each line would wait for the one
  // before.
  HWY_NOINLINE void PrefetchLines() {
    PrefetchRows left = left_;
    int64_t at = at_;
    for (int64_t lines = lines_; lines > 0;) {
      if (left.rows == 0) {
        if (next_ == end_) {
          lines_ = 0;
          return;
        }
        left = *next_++;
        if (left.stride == left.bytes) {
          left = {left.data, 0, 1, left.rows * left.bytes};
        }
      }
      for (; lines > 0 && at < left.bytes; at += kLine, --lines) {
        PrefetchL2(left.data + at);
      }
      if (at >= left.bytes) {
        at = 0;
        left.data += left.stride;
        --left.rows;
      }
    }
    left_ = left;
    at_ = at;
  }

  const PrefetchRows* next_;
  const PrefetchRows* end_;
  PrefetchRows left_;
  int64_t at_ = 0;     // in the first row left
  int64_t lines_ = 0;  // at a step; 0: there are no more
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_MATH_PREFETCH_INL_H_
