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

// By itself AMX is taken for bf16 in `fast` only: products of several terms are
// slower there than F32Fma (docs/performance.md).
const Engine* ChooseEngine(int64_t targets, const EngineCap& cap, DType inputs,
                           Precision precision, int64_t keys) {
  if (inputs == DType::kF64) return F64Engine(targets);
  if (cap.name == kF32 || !HasAmx(targets)) return F32Engine(targets);
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
