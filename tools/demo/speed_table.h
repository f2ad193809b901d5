// SPDX-License-Identifier: Apache-2.0

// How fast forward and backward are here, as a share of what the machine can
// do.
#ifndef FA2_TOOLS_DEMO_SPEED_TABLE_H_
#define FA2_TOOLS_DEMO_SPEED_TABLE_H_

#include <cstdint>

#include "fa2/context.h"

namespace fa2::demo {

struct SpeedOptions {
  int64_t sequence = 2048;  // queries and keys
  int64_t heads = 4;
  double seconds = 0.5;  // spent on each number
};

// Prints a row for each dtype, head dimension and mask as it is measured, on
// the context's threads. Throws std::runtime_error if a call fails.
void PrintSpeedTable(const SpeedOptions& options, Context* context);

}  // namespace fa2::demo

#endif  // FA2_TOOLS_DEMO_SPEED_TABLE_H_
