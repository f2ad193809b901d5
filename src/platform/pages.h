// SPDX-License-Identifier: Apache-2.0

// Large allocations on huge pages, where the system has them.
#ifndef FA2_SRC_PLATFORM_PAGES_H_
#define FA2_SRC_PLATFORM_PAGES_H_

#include <cstddef>

namespace fa2::platform {

// `bytes` bytes, aligned to `alignment`, a power of two; from 2 MiB on, on huge
// pages if the system has any to give. nullptr when memory has run out. Pages
// are touched by whoever writes to them first.
void* AllocatePages(size_t bytes, size_t alignment);
void ReleasePages(void* memory);

}  // namespace fa2::platform

#endif  // FA2_SRC_PLATFORM_PAGES_H_
