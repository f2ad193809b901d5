// SPDX-License-Identifier: Apache-2.0

// How many cores this process may run on.
#ifndef FA2_SRC_PLATFORM_CORES_H_
#define FA2_SRC_PLATFORM_CORES_H_

namespace fa2::platform {

// At least 1. Where the system has an affinity mask (taskset, a container's
// cpuset) only the cores in it count.
int UsableCores();

}  // namespace fa2::platform

#endif  // FA2_SRC_PLATFORM_CORES_H_
