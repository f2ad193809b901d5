// SPDX-License-Identifier: Apache-2.0

// Integer arithmetic and intervals.
#ifndef FA2_SRC_COMMON_INTEGERS_H_
#define FA2_SRC_COMMON_INTEGERS_H_

#include <cstdint>

namespace fa2 {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return CeilDiv(value, multiple) * multiple;
}

// Half-open interval of positions.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return begin >= end; }
  int64_t size() const { return empty() ? 0 : end - begin; }
};

}  // namespace fa2

#endif  // FA2_SRC_COMMON_INTEGERS_H_
