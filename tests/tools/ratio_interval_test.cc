// SPDX-License-Identifier: Apache-2.0
#include "tools/fa2/ratio_interval.h"

#include <gtest/gtest.h>

#include <random>
#include <utility>
#include <vector>

namespace fa2::tool {
namespace {

TEST(RatioInterval, HoldsTheRatioAsOftenAsItSays) {
  std::mt19937_64 random(7);
  std::lognormal_distribution<double> noise(0.0, 0.1);
  int held = 0;
  constexpr int kTrials = 2000;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<double> a, b;
    for (int n = 0; n < 9; ++n) a.push_back(noise(random));
    for (int n = 0; n < 7; ++n) b.push_back(1.3 * noise(random));
    const RatioInterval r = IntervalOfRatio(a, b);
    EXPECT_TRUE(r.sure);
    EXPECT_LE(r.low, r.ratio);
    EXPECT_LE(r.ratio, r.high);
    held += r.low <= 1.3 && 1.3 <= r.high;
  }
  // 95% at least, less four deviations of so many trials.
  EXPECT_GE(held, kTrials * 0.95 - 4 * 10);
  // Not the whole range either, which would hold it in all but 1 of 5,720.
  EXPECT_LE(held, kTrials * 0.985);
}

// Tables of Mann and Whitney's U, two-sided, 5%: 2 of 5 and 5, 17 of 9 and 9.
TEST(RatioInterval, LeavesOutWhatTheTablesSay) {
  for (const auto& [n, critical] : {std::pair(5, 2), std::pair(9, 17)}) {
    std::vector<double> a(static_cast<size_t>(n), 1.0), b;
    for (int i = 0; i < n; ++i) b.push_back(1.0 + i);
    // Each value of b stands n times among the ratios.
    const RatioInterval r = IntervalOfRatio(a, b);
    EXPECT_DOUBLE_EQ(r.low, 1.0 + critical / n);
    EXPECT_DOUBLE_EQ(r.high, static_cast<double>(n - critical / n));
  }
}

TEST(RatioInterval, FewRoundsAreNotSure) {
  EXPECT_FALSE(IntervalOfRatio({1, 2, 3}, {4, 5, 6}).sure);
  EXPECT_TRUE(IntervalOfRatio({1, 2, 3, 4}, {4, 5, 6, 7}).sure);
  const RatioInterval one = IntervalOfRatio({2.0}, {3.0});
  EXPECT_DOUBLE_EQ(one.ratio, 1.5);
  EXPECT_FALSE(one.sure);
}

}  // namespace
}  // namespace fa2::tool
