// SPDX-License-Identifier: Apache-2.0

// The backward pass on AMX: f16, `exact`.
#include "src/simd/amx/target.h"

#if FA2_AMX_TARGET != 0
#include "src/simd/amx/instances/tiles.h"
#include "src/simd/amx/select_target.h"
// After select_target.h.
#include "src/simd/amx/backward/block-inl.h"

namespace fa2::simd::HWY_NAMESPACE {

template struct AmxBackward<AmxVariant<FA2_AMX_TILES, AmxTerms::kF16Exact>>;

}  // namespace fa2::simd::HWY_NAMESPACE
#endif
