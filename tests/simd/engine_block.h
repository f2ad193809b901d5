// SPDX-License-Identifier: Apache-2.0

// One block-level attention problem for a matrix engine: queries against two
// blocks of keys, run through the engine's interface and through double loops.
#ifndef FA2_TESTS_SIMD_ENGINE_BLOCK_H_
#define FA2_TESTS_SIMD_ENGINE_BLOCK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "fa2/types.h"
#include "src/simd/engine.h"

namespace fa2::simd {

enum class BlockMask {
  kNone,          // only the tails are hidden
  kCausal,        // key <= query + shift
  kRandomRanges,  // a random range of keys for each query, also empty ones
  kRandomTiles,   // whole tiles only: a random range for each 32 queries
};

struct BlockCase {
  int64_t head_dim = 64;
  int64_t value_dim = 64;
  int64_t queries = 64;
  int64_t keys[2] = {64, 0};
  BlockMask mask = BlockMask::kNone;
  int64_t shift = 0;
  DType dtype = DType::kBF16;
  double softcap = 0.0;
  double alibi_slope = 0.0;
  bool bias = false;  // with some -inf
  bool dropout = false;
  bool want_ds = false;        // dS output and the ALiBi gradient
  bool nan_in_masked = false;  // keys that no query sees hold NaN
  bool equal_values = false;   // V is 1 everywhere, and so is out
  double input_scale = 1.0;    // of Q and K
  uint32_t seed = 1;

  std::string Name() const;
};

// Relative L2 errors against double loops; also infinite where something that
// must be exactly 0 or finite is not.
struct BlockErrors {
  double dq = 0.0;
  double dk = 0.0;
  double dv = 0.0;
  double ds = 0.0;
  double alibi = 0.0;
  double out = 0.0;
  double lse = 0.0;  // absolute

  double Largest() const;
};

BlockErrors RunBlockCase(const Engine& engine, const BlockCase& c);

}  // namespace fa2::simd

#endif  // FA2_TESTS_SIMD_ENGINE_BLOCK_H_
