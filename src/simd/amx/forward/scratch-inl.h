// SPDX-License-Identifier: Apache-2.0

// How the forward pass on AMX cuts keys into strips, and the scratch that it
// needs for them.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_SCRATCH_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_SCRATCH_INL_H_

#include "src/simd/amx/forward/strip-inl.h"
#include "src/simd/amx/products-inl.h"
#include "src/simd/amx/stream-inl.h"
#include "src/simd/amx/visibility.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

template <class Variant, int kSteps>
struct ForwardScratch {
  // Where products of O are long, longer strips spare loads and stores of O
  // (D 256: 0.42 -> 0.46 of the peak); where they are not, S and P of a short
  // strip stay in L1 (D 64: 0.23 -> 0.26, D 128: 0.35 -> 0.39).
  static constexpr int64_t kStripPanels =
      kSteps == 2 || kSteps == 4 ? 4 : kMostStripPanels;
  static constexpr bool kUsual = Variant::kFast && kSteps > 0;
  // Sub-blocks of a strip whose exponentials may be taken during O of the strip
  // before, beside the products of its last kEarly pairs of column tiles: they
  // need more of the vector ports than products of S leave, but for D 256 (D 64
  // +5%, D 128 +2%, D 256 0).
  static constexpr int64_t kEarly =
      !kUsual || Variant::kInputTerms > 1 || Variant::kProbabilityTerms > 1 ? 0
      : kSteps == 2                                                         ? 2
      : kSteps == 4                                                         ? 1
                                                                            : 0;
  // Those of them whose P has a place for either of two strips. Elsewhere it
  // goes where P of the strip before has just been read for the last time: at D
  // 128 more of P in L1 would cost what half of a strip would gain.
  static constexpr int64_t kTwice = kSteps == 2 ? kEarly : 0;
  static constexpr int64_t kTermBytes =
      (kStripPanels + kTwice) * 2 * kTileBytes;  // of P

  // For `keys` x `queries`, both in panels.
  static int64_t Bytes(int64_t keys, int64_t queries) {
    return kStripPanels * 4 * kTileBytes +
           kTermBytes * Variant::kProbabilityTerms + 4 * kTileBytes +
           kStreamElements * 4 + kStripPanels * 128 +
           (keys * queries * int64_t{sizeof(SubBlock)} + 63) / 64 * 64;
  }

  // `queries` in panels.
  ForwardScratch(void* memory, int64_t queries) {
    uint8_t* at = static_cast<uint8_t*>(memory);
    const auto take = [&at](int64_t n) {
      uint8_t* taken = at;
      at += n;
      return taken;
    };
    s = take(kStripPanels * 4 * kTileBytes);
    p = take(kTermBytes * Variant::kProbabilityTerms);
    dummy = {take(4 * kTileBytes)};
    bias = reinterpret_cast<float*>(take(kStreamElements * 4));
    keep = reinterpret_cast<uint16_t*>(take(kStripPanels * 128));
    sub_blocks = {reinterpret_cast<SubBlock*>(at), queries};
  }

  uint8_t* s;
  uint8_t* p;
  PendingSquare dummy;  // for results that nobody wants
  float* bias;          // of a sub-block of bias_stream
  uint16_t* keep;       // of a strip, bits of dropout_stream
  SubBlockMap sub_blocks;
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_SCRATCH_INL_H_
