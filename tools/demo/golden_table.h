// SPDX-License-Identifier: Apache-2.0

// fa2 against float64 on the inputs of a GPU's kernel, next to that kernel.
#ifndef FA2_TOOLS_DEMO_GOLDEN_TABLE_H_
#define FA2_TOOLS_DEMO_GOLDEN_TABLE_H_

#include <string>

#include "fa2/context.h"

namespace fa2::demo {

// Prints a row for each case of the file as it is done, then a verdict. Returns
// whether fa2's error is nowhere above the GPU's, or above what that kernel
// reaches elsewhere in the cases where it is mistaken. Throws
// std::runtime_error if the file cannot be read or a call fails.
bool PrintGoldenTable(const std::string& path, Context* context);

}  // namespace fa2::demo

#endif  // FA2_TOOLS_DEMO_GOLDEN_TABLE_H_
