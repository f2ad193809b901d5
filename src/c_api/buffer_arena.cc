// SPDX-License-Identifier: Apache-2.0
#include "src/c_api/buffer_arena.h"

namespace fa2::c_api {

fa2::Allocator BufferArena::Allocator() {
  fa2::Allocator allocator;
  allocator.allocate = [](void* opaque, size_t bytes, size_t alignment) {
    return static_cast<BufferArena*>(opaque)->Allocate(bytes, alignment);
  };
  allocator.release = [](void* opaque, void* memory, size_t) {
    static_cast<BufferArena*>(opaque)->Release(memory);
  };
  allocator.opaque = this;
  return allocator;
}

void* BufferArena::Allocate(size_t bytes, size_t alignment) {
  const std::lock_guard<platform::ForkMutex> lock(mutex_);
  size_t gap_begin = 0;
  for (size_t i = 0; i <= used_.size(); ++i) {
    const size_t gap_end = i < used_.size() ? used_[i].begin : bytes_;
    const size_t padding =
        (alignment - (begin_ + gap_begin) % alignment) % alignment;
    const size_t gap = gap_end - gap_begin;
    if (padding <= gap && bytes <= gap - padding) {
      const Block block = {gap_begin + padding, gap_begin + padding + bytes};
      used_.insert(used_.begin() + static_cast<std::ptrdiff_t>(i), block);
      return reinterpret_cast<void*>(begin_ + block.begin);
    }
    if (i < used_.size()) gap_begin = used_[i].end;
  }
  return nullptr;
}

void BufferArena::Release(void* memory) {
  const std::lock_guard<platform::ForkMutex> lock(mutex_);
  const size_t begin = reinterpret_cast<uintptr_t>(memory) - begin_;
  for (auto it = used_.begin(); it != used_.end(); ++it) {
    if (it->begin == begin) {
      used_.erase(it);
      return;
    }
  }
}

}  // namespace fa2::c_api
