// SPDX-License-Identifier: Apache-2.0
#include "tools/fa2/ratio_interval.h"

#include <algorithm>
#include <cstddef>

namespace fa2::tool {
namespace {

// P(U = u) of two sets of n and m values of one distribution: the coefficients
// of the product over i of (1 - x^(m + i)) / (1 - x^i), over their sum.
std::vector<double> DistributionOfU(size_t n, size_t m) {
  std::vector<double> ways(n * m + 1, 0.0);
  ways[0] = 1.0;
  for (size_t i = 1; i <= n; ++i) {
    for (size_t u = ways.size(); u-- > m + i;) ways[u] -= ways[u - m - i];
    for (size_t u = i; u < ways.size(); ++u) ways[u] += ways[u - i];
    // In range of a double for any number of rounds.
    double sum = 0.0;
    for (const double w : ways) sum += w;
    for (double& w : ways) w /= sum;
  }
  return ways;
}

}  // namespace

RatioInterval IntervalOfRatio(const std::vector<double>& a,
                              const std::vector<double>& b, double confidence) {
  std::vector<double> ratios;
  for (const double x : a) {
    for (const double y : b) ratios.push_back(y / x);
  }
  std::sort(ratios.begin(), ratios.end());
  const size_t count = ratios.size();
  RatioInterval result;
  result.ratio = (ratios[(count - 1) / 2] + ratios[count / 2]) / 2.0;
  const std::vector<double> probability = DistributionOfU(a.size(), b.size());
  // Ratios that may be left out at each end.
  size_t left_out = 0;
  double outside = 2.0 * probability[0];
  result.sure = outside <= 1.0 - confidence;
  while (result.sure && left_out + 1 < (count + 1) / 2 &&
         outside + 2.0 * probability[left_out + 1] <= 1.0 - confidence) {
    ++left_out;
    outside += 2.0 * probability[left_out];
  }
  result.low = ratios[left_out];
  result.high = ratios[count - 1 - left_out];
  return result;
}

}  // namespace fa2::tool
