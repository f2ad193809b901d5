// SPDX-License-Identifier: Apache-2.0

// What this machine is.
#ifndef FA2_TOOLS_FA2_MACHINE_H_
#define FA2_TOOLS_FA2_MACHINE_H_

#include <cstdint>
#include <string>

namespace fa2::tool {

// The model's name, as the kernel gives it; "unknown" where it gives none.
std::string CpuName();

// Bytes of a level's data cache; 0 where the system does not say.
int64_t CacheBytes(int level);

}  // namespace fa2::tool

#endif  // FA2_TOOLS_FA2_MACHINE_H_
