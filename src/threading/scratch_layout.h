// Handing out parts of a workspace.
#ifndef FA2_SRC_THREADING_SCRATCH_LAYOUT_H_
#define FA2_SRC_THREADING_SCRATCH_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <new>

#include "src/threading/workspace.h"

namespace fa2::attention {

// First adds up how much is needed (base nullptr), then, run over the same
// parts once more, tells where each one lies.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <typename T = std::byte>
  T* Take(size_t count) {
    T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += threading::AlignUp(count * sizeof(T));
    return part;
  }

  // `count` parts T(owner, this), which take what they hold after themselves.
  template <typename T, class Owner>
  T* Construct(int count, const Owner& owner) {
    T* const parts = Take<T>(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      if (parts == nullptr) {
        const T sized(owner, this);
      } else {
        new (parts + i) T(owner, this);
      }
    }
    return parts;
  }

  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_THREADING_SCRATCH_LAYOUT_H_
