// SPDX-License-Identifier: Apache-2.0

// The variants of the AMX kernels: one for each way to hold values in bf16
// terms, for one class of tile registers. Their passes are compiled in units of
// their own (instances/), so that no unit holds many of them.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_VARIANT_INL_H_
#define FA2_SRC_SIMD_AMX_VARIANT_INL_H_

#include <cstddef>
#include <cstdint>

#include "src/simd/amx/engine.h"
#include "src/simd/amx/tile-inl.h"
#include "src/simd/engine.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

struct TermCounts {
  int input;        // of Q, K, V and dO
  int probability;  // of P
  int gradient;     // of dS
  // Products of terms whose indices sum to as much are left out of S.
  int score_limit;
};

constexpr TermCounts CountsOf(AmxTerms terms) {
  switch (terms) {
    case AmxTerms::kBf16:
      return {1, 1, 1, 1};
    case AmxTerms::kBf16FewKeys:
      return {1, 2, 1, 2};
    case AmxTerms::kBf16Exact:
      return {1, 3, 3, 3};
    case AmxTerms::kF16:
      return {2, 2, 2, 3};
    case AmxTerms::kF16Exact:
      return {2, 3, 3, 3};
    case AmxTerms::kF32High:
      return {2, 2, 2, 2};
    case AmxTerms::kF32:
      return {3, 3, 3, 3};
  }
  return {};
}

template <class TilesClass, AmxTerms kTerms>
struct AmxVariant {
  using Tiles = TilesClass;
  static constexpr TermCounts kCounts = CountsOf(kTerms);
  static constexpr int kInputTerms = kCounts.input;
  static constexpr int kProbabilityTerms = kCounts.probability;
  static constexpr int kGradientTerms = kCounts.gradient;
  static constexpr int kTermLimit = kCounts.probability;
  static constexpr int kScoreTermLimit = kCounts.score_limit;
  static constexpr bool kFast = kGradientTerms == 1;
  // Degree of RoughExp2; 0: Exp2. Where P is rounded to bf16, 2e-3, degree 3
  // adds 0.07% to the error of out.
  static constexpr int kExpDegree = kProbabilityTerms == 1   ? 3
                                    : kProbabilityTerms == 2 ? 4
                                                             : 0;
};

// The passes of a variant, as Engine takes them. Defined in forward/block-inl.h
// and backward/block-inl.h.
template <class Variant>
struct AmxForward {
  static void Run(const ForwardBlock& block);
  static size_t ScratchBytes(const BlockSizes& blocks, int64_t head_dim,
                             int64_t value_dim);
};
template <class Variant>
struct AmxBackward {
  static void Run(const BackwardBlock& block);
  static size_t ScratchBytes(const BlockSizes& blocks, int64_t head_dim,
                             int64_t value_dim);
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_VARIANT_INL_H_
