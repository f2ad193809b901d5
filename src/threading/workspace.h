// SPDX-License-Identifier: Apache-2.0

// Scratch memory that outlives calls: fetching fresh pages costs more than the
// arithmetic done on them, so a context keeps what it once got.
#ifndef FA2_SRC_THREADING_WORKSPACE_H_
#define FA2_SRC_THREADING_WORKSPACE_H_

#include <cstddef>
#include <vector>

#include "fa2/context.h"
#include "fa2/status.h"
#include "src/platform/fork_mutex.h"

namespace fa2::threading {

// Every workspace starts on this boundary: two cache lines, since Intel's
// second-level prefetcher fetches lines in pairs.
inline constexpr size_t kWorkspaceAlignment = 128;

// Rounds a part of a workspace up to whole cache lines.
constexpr size_t AlignUp(size_t bytes, size_t alignment = kWorkspaceAlignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

class WorkspacePool;

// Memory for one call, given back to its pool by the destructor. Contents are
// whatever the last call left.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace() { Reset(); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void Reset();

 private:
  friend class WorkspacePool;
  WorkspacePool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

class WorkspacePool {
 public:
  // `limit` in bytes, 0 for none.
  WorkspacePool(const Allocator& allocator, size_t limit);
  ~WorkspacePool();
  WorkspacePool(const WorkspacePool&) = delete;
  WorkspacePool& operator=(const WorkspacePool&) = delete;

  // At least `bytes` bytes. Fails with kOutOfMemory when the limit or the
  // allocator does not allow it.
  Status Acquire(size_t bytes, Workspace* workspace);

  // Gives back what no call is using.
  void Trim();

  size_t HeldBytes() const;
  size_t PeakBytes() const;
  size_t Allocations() const;

 private:
  friend class Workspace;
  struct Buffer {
    std::byte* data;
    size_t bytes;
    bool in_use;
  };
  void Release(std::byte* data);
  void TrimLocked();

  const Allocator allocator_;
  const size_t limit_;
  mutable platform::ForkMutex mutex_;
  std::vector<Buffer> buffers_;
  size_t held_ = 0;
  size_t peak_ = 0;
  size_t allocations_ = 0;
};

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_WORKSPACE_H_
