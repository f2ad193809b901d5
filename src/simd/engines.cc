#include "src/simd/engines.h"

#include "src/simd/amx_engine.h"
#include "src/simd/amx_target.h"
#include "src/simd/bf16dot_engine.h"
#include "src/simd/bf16dot_target.h"

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

// Whether bf16 in `fast` takes Bf16Dot where AMX is not taken.
bool TakesBf16Dot(int64_t targets, const EngineCap& cap) {
  if (cap.name == kF32 || !HasBf16Dot(targets)) return false;
  return cap.name == kBf16Dot || Bf16DotIsFast();
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

// By itself AMX is taken for bf16 in `fast` only: products of several terms are
// slower there than F32Fma (docs/performance.md).
const Engine* ChooseEngine(int64_t targets, const EngineCap& cap, DType inputs,
                           Precision precision, int64_t keys) {
  if (inputs == DType::kF64) return F64Engine(targets);
  if (cap.name == kF32 || cap.name == kBf16Dot || !HasAmx(targets)) {
    const bool dot = inputs == DType::kBF16 && precision != Precision::kExact &&
                     TakesBf16Dot(targets, cap);
    if (!dot) return F32Engine(targets);
    return Bf16DotEngine(keys < kManyKeys ? Bf16DotTerms::kTwo
                                          : Bf16DotTerms::kOne);
  }
  if (inputs == DType::kBF16 && precision != Precision::kExact) {
    return AmxEngine(keys < kManyKeys ? AmxTerms::kBf16FewKeys
                                      : AmxTerms::kBf16);
  }
  if (cap.name != kAmx) return F32Engine(targets);
  switch (inputs) {
    case DType::kBF16:
      return AmxEngine(AmxTerms::kBf16Exact);
    case DType::kF16:
      return AmxEngine(AmxTerms::kF16Exact);
    default:
      return AmxEngine(AmxTerms::kF32);
  }
}

}  // namespace fa2::simd
