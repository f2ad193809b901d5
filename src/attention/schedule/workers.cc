// SPDX-License-Identifier: Apache-2.0
#include "src/attention/schedule/workers.h"

#include <algorithm>
#include <cmath>

namespace fa2::attention {

int UsefulWorkers(int threads, double operations, int64_t items) {
  constexpr double kPerMicrosecond = 0.4e6;  // AMX 0.8e6, other engines 0.2e6
  constexpr double kItem = 2.0;  // packing and storing short sequences
  // A thread that sleeps takes as long to wake, and one that spins must be told
  // of the work: what is less is done before it comes.
  constexpr double kLeastShared = 10.0;
  const double all = static_cast<double>(items);
  const double alone = operations / kPerMicrosecond + kItem * all;
  if (alone < kLeastShared) return 1;
  const double best = std::ceil(std::sqrt(alone));
  return static_cast<int>(
      std::clamp(std::min(best, all), 1.0, static_cast<double>(threads)));
}

}  // namespace fa2::attention
