// SPDX-License-Identifier: Apache-2.0

// Workspace out of one buffer of the caller's.
#ifndef FA2_SRC_C_API_BUFFER_ARENA_H_
#define FA2_SRC_C_API_BUFFER_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fa2/context.h"
#include "src/platform/fork_mutex.h"

namespace fa2::c_api {

// First fit, with the blocks in use kept in order of address. A context asks
// for a handful of blocks (one a call in flight), so a linear search is right.
class BufferArena {
 public:
  BufferArena(void* memory, size_t bytes)
      : begin_(reinterpret_cast<uintptr_t>(memory)), bytes_(bytes) {}
  BufferArena(const BufferArena&) = delete;
  BufferArena& operator=(const BufferArena&) = delete;

  // Refers to this arena.
  fa2::Allocator Allocator();

 private:
  struct Block {
    size_t begin;  // offset in the buffer
    size_t end;
  };
  // nullptr when no gap is large enough.
  void* Allocate(size_t bytes, size_t alignment);
  void Release(void* memory);

  const uintptr_t begin_;
  const size_t bytes_;
  platform::ForkMutex mutex_;
  std::vector<Block> used_;
};

}  // namespace fa2::c_api

#endif  // FA2_SRC_C_API_BUFFER_ARENA_H_
