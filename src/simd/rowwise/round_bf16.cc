// SPDX-License-Identifier: Apache-2.0
#include "src/simd/rowwise/round_bf16.h"

#include "src/common/half.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/rowwise/round_bf16.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "src/simd/math/store-inl.h"
#include "src/simd/target.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void RoundToBf16(const float* HWY_RESTRICT from, size_t count,
                 uint16_t* HWY_RESTRICT to) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    StoreNarrow(d, StoredBF16(), hn::LoadU(d, from + i), to + i);
  }
  for (; i < count; ++i) to[i] = F32ToBf16(from[i]);
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fa2::simd {

HWY_EXPORT(RoundToBf16);

void RoundToBf16(int64_t targets, const float* from, size_t count,
                 uint16_t* to) {
  FA2_TARGET_FUNCTION(RoundToBf16, targets)(from, count, to);
}

}  // namespace fa2::simd
#endif  // HWY_ONCE
