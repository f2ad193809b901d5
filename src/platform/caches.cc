// SPDX-License-Identifier: Apache-2.0
#include "src/platform/caches.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace fa2::platform {

size_t LastLevelCacheBytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? static_cast<size_t>(bytes) : 0;
#else
  return 0;
#endif
}

}  // namespace fa2::platform
