// SPDX-License-Identifier: Apache-2.0
#include "src/threading/workspace.h"

#include <algorithm>
#include <mutex>
#include <string>

#include "src/platform/pages.h"

namespace fa2::threading {
namespace {

void* AllocatePages(void*, size_t bytes, size_t alignment) {
  return platform::AllocatePages(bytes, alignment);
}

void ReleasePages(void*, void* memory, size_t) {
  platform::ReleasePages(memory);
}

Allocator OrDefault(const Allocator& allocator) {
  return allocator.allocate == nullptr
             ? Allocator{AllocatePages, ReleasePages, nullptr}
             : allocator;
}

}  // namespace

void Workspace::Reset() {
  if (pool_ != nullptr) pool_->Release(data_);
  pool_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
}

WorkspacePool::WorkspacePool(const Allocator& allocator, size_t limit)
    : allocator_(OrDefault(allocator)), limit_(limit) {}

WorkspacePool::~WorkspacePool() { Trim(); }

Status WorkspacePool::Acquire(size_t bytes, Workspace* workspace) {
  workspace->Reset();
  const size_t wanted = AlignUp(std::max<size_t>(bytes, 1));
  const std::lock_guard<platform::ForkMutex> lock(mutex_);
  // The smallest free buffer that is large enough.
  Buffer* best = nullptr;
  for (Buffer& buffer : buffers_) {
    if (!buffer.in_use && buffer.bytes >= wanted &&
        (best == nullptr || buffer.bytes < best->bytes)) {
      best = &buffer;
    }
  }
  if (best == nullptr) {
    // Free buffers are all too small for this call: they would only add to
    // what the process holds.
    TrimLocked();
    if (limit_ != 0 && (wanted > limit_ || held_ > limit_ - wanted)) {
      return Status::OutOfMemory(
          "workspace: this call needs " + std::to_string(wanted) +
          " bytes beside " + std::to_string(held_) +
          " bytes in use, but the context's memory_limit is " +
          std::to_string(limit_) + " bytes");
    }
    buffers_.reserve(buffers_.size() + 1);
    void* memory =
        allocator_.allocate(allocator_.opaque, wanted, kWorkspaceAlignment);
    if (memory == nullptr) {
      return Status::OutOfMemory("workspace: the allocator has no " +
                                 std::to_string(wanted) + " bytes");
    }
    buffers_.push_back({static_cast<std::byte*>(memory), wanted, false});
    best = &buffers_.back();
    held_ += wanted;
    peak_ = std::max(peak_, held_);
    ++allocations_;
  }
  best->in_use = true;
  workspace->pool_ = this;
  workspace->data_ = best->data;
  workspace->bytes_ = best->bytes;
  return Status::Ok();
}

void WorkspacePool::Trim() {
  const std::lock_guard<platform::ForkMutex> lock(mutex_);
  TrimLocked();
}

void WorkspacePool::TrimLocked() {
  const auto used_end =
      std::partition(buffers_.begin(), buffers_.end(),
                     [](const Buffer& b) { return b.in_use; });
  for (auto it = used_end; it != buffers_.end(); ++it) {
    allocator_.release(allocator_.opaque, it->data, it->bytes);
    held_ -= it->bytes;
  }
  buffers_.erase(used_end, buffers_.end());
}

void WorkspacePool::Release(std::byte* data) {
  const std::lock_guard<platform::ForkMutex> lock(mutex_);
  for (Buffer& buffer : buffers_) {
    if (buffer.data == data) buffer.in_use = false;
  }
}

size_t WorkspacePool::HeldBytes() const {
  const std::lock_guard<platform::ForkMutex> lock(mutex_);
  return held_;
}

size_t WorkspacePool::PeakBytes() const {
  const std::lock_guard<platform::ForkMutex> lock(mutex_);
  return peak_;
}

size_t WorkspacePool::Allocations() const {
  const std::lock_guard<platform::ForkMutex> lock(mutex_);
  return allocations_;
}

}  // namespace fa2::threading
