// SPDX-License-Identifier: Apache-2.0

// Sizes of this machine's caches.
#ifndef FA2_SRC_PLATFORM_CACHES_H_
#define FA2_SRC_PLATFORM_CACHES_H_

#include <cstddef>

namespace fa2::platform {

// Bytes of the last-level cache that a core uses; 0 where the system does not
// say.
size_t LastLevelCacheBytes();

}  // namespace fa2::platform

#endif  // FA2_SRC_PLATFORM_CACHES_H_
