#include "src/attention/mask.h"

namespace fa2::attention {

double Mask::Pairs(Interval queries, Interval keys) const {
  // Tile rows are precise enough to share out work and cheap for long blocks.
  double pairs = 0.0;
  for (int64_t i = queries.begin; i < queries.end; i += simd::kTileQueries) {
    const int64_t end = std::min(i + simd::kTileQueries, queries.end);
    const Interval seen = Keys((i + end) / 2);
    const int64_t visible =
        std::min(seen.end, keys.end) - std::max(seen.begin, keys.begin);
    pairs += static_cast<double>(std::max<int64_t>(visible, 0)) *
             static_cast<double>(end - i);
  }
  return pairs;
}

}  // namespace fa2::attention
