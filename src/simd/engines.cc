#include "src/simd/engines.h"

#include "src/simd/amx_engine.h"
#include "src/simd/amx_target.h"

namespace fa2::simd {
namespace {

constexpr char kAmx[] = "amx";
constexpr char kF32[] = "f32";

// AMX kernels are AVX-512 code around the tile instructions: capping the
// targets below that takes them away.
bool HasAmx(int64_t targets) {
  return FA2_AMX_TARGET != 0 && (targets & FA2_AMX_TARGET) != 0 &&
         AmxAvailable();
}

}  // namespace

std::vector<std::string> EngineNames(int64_t targets) {
  std::vector<std::string> names;
  if (HasAmx(targets)) names.push_back(kAmx);
  names.push_back(kF32);
  return names;
}

const Engine* ChooseEngine(int64_t targets, const EngineCap& cap, DType inputs,
                           Precision precision) {
  if (inputs == DType::kF64) return F64Engine(targets);
  if (cap.name == kF32 || !HasAmx(targets)) return F32Engine(targets);
  const bool forced = cap.name == kAmx;
  const bool exact = precision == Precision::kExact;
  switch (inputs) {
    case DType::kBF16:
      return AmxEngine(exact ? AmxTerms::kBf16Exact : AmxTerms::kBf16);
    case DType::kF16:
      // Two terms of P and dS are not enough for f16 without `high`: 3e-6 is
      // f16's bound too.
      return AmxEngine(precision == Precision::kHigh ? AmxTerms::kTwoTerms
                                                     : AmxTerms::kF16Exact);
    default:
      if (precision == Precision::kHigh) return AmxEngine(AmxTerms::kTwoTerms);
      // Six products, their packing and a fused pass of three terms.
      return forced ? AmxEngine(AmxTerms::kF32) : F32Engine(targets);
  }
}

}  // namespace fa2::simd
