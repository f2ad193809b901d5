// SPDX-License-Identifier: Apache-2.0
#include "src/platform/caches.h"

#include <cstdio>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace fa2::platform {
namespace {

#if defined(__linux__)
// As Linux lists the caches of a core: 32768K. 0 where it does not.
size_t ListedBytes(const char* path) {
  std::FILE* const file = std::fopen(path, "re");
  if (file == nullptr) return 0;
  size_t size = 0;
  char unit = ' ';
  const int read = std::fscanf(file, "%zu%c", &size, &unit);
  std::fclose(file);
  if (read < 2) return 0;
  return unit == 'K' ? size << 10 : unit == 'M' ? size << 20 : 0;
}
#endif

}  // namespace

size_t LastLevelCacheBytes() {
#if defined(__linux__)
  // sysconf tells the sum of all that the socket has: 384 MiB on an AMD EPYC
  // whose cores use 32.
  const size_t listed =
      ListedBytes("/sys/devices/system/cpu/cpu0/cache/index3/size");
  if (listed != 0) return listed;
#endif
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? static_cast<size_t>(bytes) : 0;
#else
  return 0;
#endif
}

}  // namespace fa2::platform
