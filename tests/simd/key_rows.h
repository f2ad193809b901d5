// SPDX-License-Identifier: Apache-2.0
#ifndef FA2_TESTS_SIMD_KEY_ROWS_H_
#define FA2_TESTS_SIMD_KEY_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "src/simd/engine.h"

namespace fa2::simd {

// The first `count` rows of an accumulator of `keys` keys, densely.
template <typename T>
void KeyRows(const Engine& engine, const void* accumulator, int64_t keys,
             int64_t depth, int64_t count, T* rows) {
  if (engine.key_accumulator_stride == nullptr) {
    engine.unpack_key_rows(accumulator, keys, depth, 0, count, rows, depth);
    return;
  }
  const int64_t stride = engine.key_accumulator_stride(depth);
  for (int64_t r = 0; r < count; ++r) {
    std::copy_n(static_cast<const T*>(accumulator) + r * stride, depth,
                rows + r * depth);
  }
}

}  // namespace fa2::simd

#endif  // FA2_TESTS_SIMD_KEY_ROWS_H_
