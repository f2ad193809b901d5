// SPDX-License-Identifier: Apache-2.0

// The forward pass on AMX: f16, `fast`.
#include "src/simd/amx/target.h"

#if FA2_AMX_TARGET != 0
#include "src/simd/amx/instances/tiles.h"
#include "src/simd/amx/select_target.h"
// After select_target.h.
#include "src/simd/amx/forward/block-inl.h"

namespace fa2::simd::HWY_NAMESPACE {

template struct AmxForward<AmxVariant<FA2_AMX_TILES, AmxTerms::kF16>>;

}  // namespace fa2::simd::HWY_NAMESPACE
#endif
