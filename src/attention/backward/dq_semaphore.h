// SPDX-License-Identifier: Apache-2.0

// The order in which items add to what items of other keys add to as well.
#ifndef FA2_SRC_ATTENTION_BACKWARD_DQ_SEMAPHORE_H_
#define FA2_SRC_ATTENTION_BACKWARD_DQ_SEMAPHORE_H_

#include <cstddef>
#include <cstdint>

#include "src/simd/engine.h"
#include "src/threading/wavefront.h"

namespace fa2::attention {

// A partial of dQ and the flag that says whether anything has been added to it.
struct DqAccum {
  std::byte* data;
  uint8_t* touched;
};

// Guards what a block pair adds to with others of its queries: dQ, and sums of
// dS over keys. The rest of a pair's work, some four fifths, waits for nobody.
class DqSemaphore {
 public:
  // `items`: of the item that the pair is step `step` of; nullptr: nobody else
  // adds.
  DqSemaphore(threading::Wavefront::Semaphore* items, int64_t step)
      : items_(items), step_(step) {}

  // Returns when the items before this one have released the step.
  void Wait() {
    if (items_ != nullptr) items_->Wait(step_);
  }
  // Once; further calls do nothing.
  void Release() {
    if (items_ == nullptr) return;
    Wait();
    items_->Release(step_);
    items_ = nullptr;
  }

  // Instead, for a pair that adds nothing.
  void Skip() {
    if (items_ == nullptr) return;
    items_->Skip(step_);
    items_ = nullptr;
  }

  // Makes the engine add `block`'s dQ to `dq` under the semaphore, which it
  // releases after the last addition if `release_after_dq`.
  void Guard(const DqAccum& dq, bool release_after_dq,
             simd::BackwardBlock* block) {
    touched_ = dq.touched;
    release_after_dq_ = release_after_dq;
    block->dq = dq.data;
    block->dq_semaphore = {&WaitForDq, &ReleaseDq, this};
  }

 private:
  static bool WaitForDq(void* state) {
    DqSemaphore& self = *static_cast<DqSemaphore*>(state);
    self.Wait();
    const bool add = *self.touched_ != 0;
    *self.touched_ = 1;
    return add;
  }
  static void ReleaseDq(void* state) {
    DqSemaphore& self = *static_cast<DqSemaphore*>(state);
    if (self.release_after_dq_) self.Release();
  }

  threading::Wavefront::Semaphore* items_;
  const int64_t step_;
  uint8_t* touched_ = nullptr;
  bool release_after_dq_ = true;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_BACKWARD_DQ_SEMAPHORE_H_
