// SPDX-License-Identifier: Apache-2.0

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

// Rounding P to bf16 leaves an error of 2^-9 of each probability, which
// averages out over many keys but not over few: where no query sees as many as
// these, `fast` keeps P to two bf16 terms if the engine can.
inline constexpr int64_t kManyKeys = 256;

// A user's choice of matrix engine, by name; empty: the default.
struct EngineCap {
  std::string name;
};

// Names of the matrix engines that the targets (a mask) and this CPU have, the
// default for bf16 first: some of "amx", "bf16dot", "f32".
std::vector<std::string> EngineNames(int64_t targets);

// What a call asks of an engine.
struct EngineUse {
  DType inputs = DType::kF32;
  Precision precision = Precision::kFast;
  int64_t keys = 0;     // no query sees more
  int64_t queries = 0;  // no more rows share a head of keys
  int64_t depth = 0;    // the greater of the head dims of Q and V
};

// The engine for a call: f64 inputs always run in f64, the rest on the engine
// that the cap names, else on the fastest.
const Engine* ChooseEngine(int64_t targets, const EngineCap& cap,
                           const EngineUse& use);

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_ENGINES_H_
