// SPDX-License-Identifier: Apache-2.0
#include "src/attention/call/mask.h"

#include <algorithm>
#include <cstdint>

namespace fa2::attention {
namespace {

// Sum over the queries i of i + offset, clipped to the keys.
double SumOfEnds(const Interval& queries, int64_t offset,
                 const Interval& keys) {
  const int64_t past_begin =
      std::clamp(keys.begin - offset, queries.begin, queries.end);
  const int64_t at_end = std::clamp(keys.end - offset, past_begin, queries.end);
  const auto product = [](int64_t a, int64_t b) {
    return static_cast<double>(a) * static_cast<double>(b);
  };
  return product(past_begin - queries.begin, keys.begin) +
         product(at_end - past_begin, past_begin + at_end - 1 + 2 * offset) /
             2.0 +
         product(queries.end - at_end, keys.end);
}

}  // namespace

double Mask::Pairs(Interval queries, Interval keys) const {
  if (queries.empty() || keys.empty()) return 0.0;
  return SumOfEnds(queries, upper_ + 1, keys) -
         SumOfEnds(queries, lower_, keys);
}

}  // namespace fa2::attention
