// SPDX-License-Identifier: Apache-2.0

// How much larger one of two sets of measurements is.
#ifndef FA2_TOOLS_FA2_RATIO_INTERVAL_H_
#define FA2_TOOLS_FA2_RATIO_INTERVAL_H_

#include <vector>

namespace fa2::tool {

struct RatioInterval {
  double ratio = 1.0;  // median of all b / a (Hodges and Lehmann)
  double low = 1.0, high = 1.0;
  // Whether the sets are large enough for the interval to hold the ratio with
  // the confidence asked for; otherwise it is the whole range.
  bool sure = false;
};

// From the order statistics of the ratios of all pairs, which Mann and
// Whitney's U counts (Moses): it needs no assumption about the noise but that
// it is alike in both. Neither set may be empty.
RatioInterval IntervalOfRatio(const std::vector<double>& a,
                              const std::vector<double>& b,
                              double confidence = 0.95);

}  // namespace fa2::tool

#endif  // FA2_TOOLS_FA2_RATIO_INTERVAL_H_
