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
  std::vector<std::string> names = {kF32};
  if (HasAmx(targets)) names.push_back(kAmx);
  return names;
}

// AMX must be asked for: in bf16 its out and dv err 0.03% to 0.4% more than a
// GPU's kernel on the same input (docs/performance.md), which is more than
// `fast` allows.
const Engine* ChooseEngine(int64_t targets, const EngineCap& cap, DType inputs,
                           Precision precision) {
  if (inputs == DType::kF64) return F64Engine(targets);
  if (cap.name != kAmx || !HasAmx(targets)) return F32Engine(targets);
  switch (inputs) {
    case DType::kBF16:
      return AmxEngine(precision == Precision::kExact ? AmxTerms::kBf16Exact
                                                      : AmxTerms::kBf16);
    case DType::kF16:
      return AmxEngine(AmxTerms::kF16Exact);
    default:
      return AmxEngine(AmxTerms::kF32);
  }
}

}  // namespace fa2::simd
