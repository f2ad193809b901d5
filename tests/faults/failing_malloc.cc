// SPDX-License-Identifier: Apache-2.0
#include "tests/faults/failing_malloc.h"

#include <atomic>
#include <cerrno>
#include <cstddef>

extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* memory);
}

namespace fa2::test {
namespace {

std::atomic<bool> g_armed{false};
std::atomic<bool> g_all{false};
std::atomic<int64_t> g_left{0};  // allocations before the one that fails
std::atomic<int64_t> g_failed{0};
std::atomic<int64_t> g_live{0};

bool Refused() {
  if (!g_armed.load()) return false;
  const int64_t left = g_left.fetch_sub(1);
  if (left > 0 || (left < 0 && !g_all.load())) return false;
  g_failed.fetch_add(1);
  errno = ENOMEM;
  return true;
}

void* Counted(void* memory) {
  if (memory != nullptr) g_live.fetch_add(1);
  return memory;
}

}  // namespace

void FailAllocation(int64_t n, Failing failing) {
  g_left.store(n);
  g_all.store(failing == Failing::kAllFrom);
  g_failed.store(0);
  g_armed.store(true);
}

int64_t StopFailing() {
  g_armed.store(false);
  return g_failed.load();
}

int64_t LiveAllocations() { return g_live.load(); }

extern "C" {

void* malloc(size_t bytes) {
  return Refused() ? nullptr : Counted(__libc_malloc(bytes));
}
void* calloc(size_t count, size_t bytes) {
  return Refused() ? nullptr : Counted(__libc_calloc(count, bytes));
}
void* realloc(void* memory, size_t bytes) {
  if (Refused()) return nullptr;
  void* const result = __libc_realloc(memory, bytes);
  if (memory == nullptr) return Counted(result);
  if (bytes == 0 && result == nullptr) g_live.fetch_sub(1);
  return result;
}
void* memalign(size_t alignment, size_t bytes) {
  return Refused() ? nullptr : Counted(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  return memalign(alignment, bytes);
}
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  void* const result = memalign(alignment, bytes);
  if (result == nullptr) return ENOMEM;
  *memory = result;
  return 0;
}
void free(void* memory) {
  if (memory != nullptr) g_live.fetch_sub(1);
  __libc_free(memory);
}

}  // extern "C"

}  // namespace fa2::test
