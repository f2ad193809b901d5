#include "src/simd/round_bf16.h"

#include "src/common/half.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/round_bf16.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "src/simd/target.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// In integers, so that every target gives the same bits.
void RoundToBf16(const float* HWY_RESTRICT from, size_t count,
                 uint16_t* HWY_RESTRICT to) {
  const hn::ScalableTag<uint32_t> d32;
  const hn::Rebind<uint16_t, decltype(d32)> d16;
  const hn::Rebind<float, decltype(d32)> df;
  const size_t lanes = hn::Lanes(d32);
  const auto half_below = hn::Set(d32, 0x7FFFu);
  const auto one = hn::Set(d32, 1u);
  const auto quiet = hn::Set(d32, 0x0040u);
  const hn::RebindToSigned<decltype(d32)> ds;
  const auto magnitude_mask = hn::Set(d32, 0x7FFFFFFFu);
  const auto infinity = hn::Set(ds, 0x7F800000);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = hn::BitCast(d32, hn::LoadU(df, from + i));
    const auto upper = hn::ShiftRight<16>(bits);
    const auto odd = hn::And(upper, one);
    const auto rounded =
        hn::ShiftRight<16>(hn::Add(bits, hn::Add(half_below, odd)));
    const auto magnitude = hn::BitCast(ds, hn::And(bits, magnitude_mask));
    const auto is_nan = hn::RebindMask(d32, hn::Gt(magnitude, infinity));
    const auto result = hn::IfThenElse(is_nan, hn::Or(upper, quiet), rounded);
    hn::StoreU(hn::TruncateTo(d16, result), d16, to + i);
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
