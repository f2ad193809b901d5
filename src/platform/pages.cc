// SPDX-License-Identifier: Apache-2.0
#include "src/platform/pages.h"

#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fa2::platform {
namespace {

// With 4 KiB pages the packed operands of one block alone would need more
// entries than the first-level TLB has (64).
constexpr size_t kHugePage = size_t{2} << 20;

size_t RoundUp(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Advice only: where transparent huge pages are off, small ones serve.
void AdviseHugePages(void* memory, size_t bytes) {
#if defined(__linux__)
  (void)madvise(memory, bytes, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

}  // namespace

void* AllocatePages(size_t bytes, size_t alignment) {
  if (bytes < kHugePage) {
    return std::aligned_alloc(alignment, RoundUp(bytes, alignment));
  }
  const size_t whole = RoundUp(bytes, kHugePage);
  void* memory = std::aligned_alloc(kHugePage, whole);
  if (memory != nullptr) AdviseHugePages(memory, whole);
  return memory;
}

void ReleasePages(void* memory) { std::free(memory); }

}  // namespace fa2::platform
