// SPDX-License-Identifier: Apache-2.0
#include "src/simd/engines.h"

#include "src/simd/amx/engine.h"
#include "src/simd/amx/target.h"
#include "src/simd/lane/bf16dot_engine.h"
#include "src/simd/lane/bf16dot_target.h"
#include "src/simd/lane/fma_engines.h"

namespace fa2::simd {
namespace {

constexpr char kAmx[] = "amx";
constexpr char kBf16Dot[] = "bf16dot";
constexpr char kF32[] = "f32";

// AMX kernels are AVX-512 code around the tile instructions: capping the
// targets below that takes them away.
bool HasAmx(int64_t targets) {
  return FA2_AMX_TARGET != 0 && (targets & FA2_AMX_TARGET) != 0 &&
         AmxAvailable();
}

// The same for its target.
bool HasBf16Dot(int64_t targets) {
  return (targets & FA2_BF16DOT_TARGET) != 0 && Bf16DotAvailable();
}

// Whether bf16 takes Bf16Dot where AMX is not taken.
bool TakesBf16Dot(int64_t targets, const EngineCap& cap) {
  if (cap.name == kF32 || !HasBf16Dot(targets)) return false;
  return cap.name == kBf16Dot || Bf16DotIsFast();
}

// f32 on AMX is six products of terms, which have to be made first. With so few
// keys a head is too short for that to pay, and lanes are faster.
constexpr int64_t kFewKeysOfF32 = 100;
// Nor does it pay with so few queries, which share the making of K's and V's
// terms: 32 queries of 257 keys and 16 of 4,096 reach 0.45 to 0.71 of PyTorch's
// rate on AMX (Emerald Rapids), 1.26 to 1.48 on lanes (Zen 4).
constexpr int64_t kFewQueriesOfF32 = 32;
// So they are with so shallow heads: a tile takes 32 elements of a row, and the
// rest is padding, while the terms of P and dS cost what they always do. One
// core of Emerald Rapids, lanes over AMX: D 8 1.3 to 2.4, D 16 1.5 to 2.2, D 24
// 0.87 to 1.6 (seven rows of eight above 1.07), D 32 0.61 to 1.34.
constexpr int64_t kShallowHeadOfF32 = 24;

// Rates of AMX with several terms over F32Fma's, backward, one core of Emerald
// Rapids: bf16 `exact` 2.2 to 3.5, f16 2.7, f32 `high` 2.7 to 2.95, f32 1.5.
AmxTerms TermsFor(DType inputs, Precision precision, int64_t keys) {
  const bool few_keys = keys < kManyKeys;
  switch (inputs) {
    case DType::kBF16:
      if (precision == Precision::kExact) return AmxTerms::kBf16Exact;
      return few_keys ? AmxTerms::kBf16FewKeys : AmxTerms::kBf16;
    case DType::kF16:
      return precision == Precision::kExact ? AmxTerms::kF16Exact
                                            : AmxTerms::kF16;
    default:
      return precision == Precision::kHigh && !few_keys ? AmxTerms::kF32High
                                                        : AmxTerms::kF32;
  }
}

}  // namespace

std::vector<std::string> EngineNames(int64_t targets) {
  std::vector<std::string> names;
  if (HasAmx(targets)) names.push_back(kAmx);
  const bool dot = HasBf16Dot(targets);
  if (dot && Bf16DotIsFast()) names.push_back(kBf16Dot);
  names.push_back(kF32);
  if (dot && !Bf16DotIsFast()) names.push_back(kBf16Dot);
  return names;
}

const Engine* ChooseEngine(int64_t targets, const EngineCap& cap,
                           const EngineUse& use) {
  const DType inputs = use.inputs;
  if (inputs == DType::kF64) return F64Engine(targets);
  const bool capped = cap.name == kF32 || cap.name == kBf16Dot;
  const bool lanes_are_faster =
      cap.name.empty() && inputs == DType::kF32 &&
      (use.keys <= kFewKeysOfF32 || use.queries <= kFewQueriesOfF32 ||
       use.depth <= kShallowHeadOfF32);
  if (!capped && !lanes_are_faster && HasAmx(targets)) {
    return AmxEngine(TermsFor(inputs, use.precision, use.keys));
  }
  if (inputs != DType::kBF16 || !TakesBf16Dot(targets, cap)) {
    return F32Engine(targets);
  }
  // 1.25 times F32Fma's rate on Zen 5, 1.3 forward.
  if (use.precision == Precision::kExact) {
    return Bf16DotEngine(Bf16DotTerms::kAll);
  }
  return Bf16DotEngine(use.keys < kManyKeys ? Bf16DotTerms::kTwo
                                            : Bf16DotTerms::kOne);
}

}  // namespace fa2::simd
