// SPDX-License-Identifier: Apache-2.0

// The F64 engine on every Highway target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/lane/f64_engine.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/highway.h"
#include "src/simd/lane/engine-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

const Engine* GetF64Engine() {
  return LaneEngine<MultiplyAdd<double>>::Get("f64", DType::kF64);
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "src/simd/lane/fma_engines.h"
#include "src/simd/target.h"

namespace fa2::simd {

HWY_EXPORT(GetF64Engine);

const Engine* F64Engine(int64_t targets) {
  return FA2_TARGET_FUNCTION(GetF64Engine, targets)();
}

}  // namespace fa2::simd

#endif  // HWY_ONCE
