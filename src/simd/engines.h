// Which engines there are, and which one a call takes.
#ifndef FA2_SRC_SIMD_ENGINES_H_
#define FA2_SRC_SIMD_ENGINES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "fa2/attention.h"
#include "fa2/types.h"
#include "src/simd/engine.h"

namespace fa2::simd {

// A user's choice of matrix engine, by name; empty: the default.
struct EngineCap {
  std::string name;
};

// Names of the matrix engines that the targets (a mask) and this CPU have, the
// default first: some of "f32", "amx".
std::vector<std::string> EngineNames(int64_t targets);

// The engine for inputs of this dtype at this precision: f64 inputs always run
// in f64, the rest on the engine that the cap names.
const Engine* ChooseEngine(int64_t targets, const EngineCap& cap, DType inputs,
                           Precision precision);

// Highway engines, defined in a translation unit each.
const Engine* F32Engine(int64_t targets);
const Engine* F64Engine(int64_t targets);

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_ENGINES_H_
