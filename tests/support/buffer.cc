// SPDX-License-Identifier: Apache-2.0
#include "tests/support/buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace fa2::test {
namespace {

// A cache line on both sides of the widest vector.
constexpr size_t kGuardBytes = 256;

Placement g_placement = Placement::kAnywhere;

size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

PlacementOfBuffers::PlacementOfBuffers(Placement placement) {
  g_placement = placement;
}
PlacementOfBuffers::~PlacementOfBuffers() {
  g_placement = Placement::kAnywhere;
}

Buffer::Buffer(size_t bytes, size_t alignment) {
  if (g_placement == Placement::kAnywhere) {
    PlaceAnywhere(bytes, alignment);
  } else {
    PlaceAtEdge(bytes, g_placement == Placement::kEndsAtPage);
  }
  std::memset(all_, 0xFF, all_bytes_);
}

void Buffer::PlaceAnywhere(size_t bytes, size_t alignment) {
  heap_.resize(bytes + 2 * kGuardBytes + alignment);
  all_ = heap_.data();
  all_bytes_ = heap_.size();
  data_ = all_ + kGuardBytes;
  while (reinterpret_cast<uintptr_t>(data_) % alignment != 0) ++data_;
}

void Buffer::PlaceAtEdge(size_t bytes, bool end) {
  const size_t page = PageBytes();
  all_bytes_ = (bytes + kGuardBytes + page - 1) / page * page;
  mapping_bytes_ = all_bytes_ + page;
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  all_ = static_cast<uint8_t*>(mapping_) + (end ? 0 : page);
  if (mprotect(all_, all_bytes_, PROT_READ | PROT_WRITE) != 0) {
    throw std::bad_alloc();
  }
  data_ = end ? all_ + all_bytes_ - bytes : all_;
}

Buffer::~Buffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

void Buffer::ForbidWriting() {
  if (mapping_ != nullptr && mprotect(all_, all_bytes_, PROT_READ) != 0) {
    throw std::bad_alloc();
  }
}

void Buffer::Snapshot() { snapshot_ = Contents(); }

void Buffer::Restore() { std::memcpy(all_, snapshot_.data(), all_bytes_); }

bool Buffer::ChangedOutside(const std::vector<ConstTensorView>& written) const {
  if (std::memcmp(all_, snapshot_.data(), all_bytes_) == 0) return false;
  std::vector<uint8_t> expected = snapshot_;
  for (const ConstTensorView& view : written) {
    const auto size = static_cast<int64_t>(SizeOf(view.dtype));
    const auto base = static_cast<const uint8_t*>(view.data) - all_;
    const auto& n = view.sizes;
    for (int64_t a = 0; a < n[0]; ++a)
      for (int64_t b = 0; b < n[1]; ++b)
        for (int64_t c = 0; c < n[2]; ++c)
          for (int64_t d = 0; d < n[3]; ++d) {
            const auto at =
                base + size * (a * view.strides[0] + b * view.strides[1] +
                               c * view.strides[2] + d * view.strides[3]);
            std::memcpy(expected.data() + at, all_ + at,
                        static_cast<size_t>(size));
          }
  }
  return std::memcmp(all_, expected.data(), all_bytes_) != 0;
}

}  // namespace fa2::test
