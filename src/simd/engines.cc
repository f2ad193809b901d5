#include "src/simd/engines.h"

namespace fa2::simd {

std::vector<std::string> EngineNames(int64_t targets) {
  (void)targets;
  return {"f32"};
}

const Engine* ChooseEngine(int64_t targets, const EngineCap& cap, DType inputs,
                           Precision precision) {
  (void)cap;
  (void)precision;
  return inputs == DType::kF64 ? F64Engine(targets) : F32Engine(targets);
}

}  // namespace fa2::simd
