// SPDX-License-Identifier: Apache-2.0

// How scratch memory is laid out: one piece of code says how much is needed and
// where each array lies.
#ifndef FA2_SRC_THREADING_SCRATCH_LAYOUT_H_
#define FA2_SRC_THREADING_SCRATCH_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <new>

#include "src/threading/workspace.h"

namespace fa2::threading {

// With a base of nullptr it adds up how much is needed; run over the same
// arrays once more, with that much memory, it says where each one lies. Arrays
// begin at a multiple of threading::AlignUp.
class ScratchLayout {
 public:
  explicit ScratchLayout(std::byte* base) : base_(base) {}

  // An array of `count` elements.
  template <typename T = std::byte>
  T* Take(size_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += AlignUp(count * sizeof(T));
    return array;
  }

  // `count` objects T(owner, this), each followed by the arrays that it takes.
  // They are of different workers, who must not write to the same cache lines.
  template <typename T, class Owner>
  T* Construct(int count, const Owner& owner) {
    static_assert(alignof(T) % kWorkspaceAlignment == 0);
    T* const objects = Take<T>(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      if (objects == nullptr) {
        const T sized(owner, this);
      } else {
        new (objects + i) T(owner, this);
      }
    }
    return objects;
  }

  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace fa2::threading

#endif  // FA2_SRC_THREADING_SCRATCH_LAYOUT_H_
