// SPDX-License-Identifier: Apache-2.0
#include "src/attention/scores/staged_bias.h"

#include <algorithm>
#include <new>

namespace fa2::attention {
namespace {

// Bytes that may stay: half of an L2 of 1 MiB.
constexpr int64_t kMostKept = 512 << 10;

bool SameMatrix(const simd::ScoreMatrix& a, const simd::ScoreMatrix& b) {
  return a.data == b.data && a.query_stride == b.query_stride &&
         a.key_stride == b.key_stride;
}

bool SameShape(const simd::StagedShape& a, const simd::StagedShape& b) {
  return a.queries == b.queries && a.keys == b.keys &&
         a.padded_queries == b.padded_queries && a.padded_keys == b.padded_keys;
}

}  // namespace

StagedBias::StagedBias(const Problem& problem, const simd::Engine& engine,
                       const simd::StagingKernels& staging,
                       const simd::BlockSizes& largest,
                       threading::ScratchLayout* layout)
    : problem_(problem),
      staging_(staging),
      largest_(largest),
      slot_bytes_(static_cast<size_t>(largest.queries * largest.keys) *
                  SizeOf(engine.accumulator)) {
  const ConstTensorView& bias = problem.options.bias;
  if (bias.sizes[0] == 1 && problem.sequences.size() > 1) {
    query_blocks_ = CeilDiv(problem.q.sizes[2], largest.queries);
    key_blocks_ = CeilDiv(problem.k.sizes[2], largest.keys);
    const int64_t wanted = bias.sizes[1] * query_blocks_ * key_blocks_;
    if (wanted * static_cast<int64_t>(slot_bytes_) <= kMostKept) {
      slots_ = std::max<int64_t>(1, wanted);
    }
  }
  slot_ = layout->Take<Slot>(static_cast<size_t>(slots_));
  if (slot_ != nullptr) {
    for (int64_t i = 0; i < slots_; ++i) new (slot_ + i) Slot();
  }
  staged_ = layout->Take(static_cast<size_t>(slots_) * slot_bytes_);
}

int64_t StagedBias::SlotOf(const PairRows& pair) const {
  if (forgets()) return 0;
  const int64_t head =
      problem_.options.bias.sizes[1] == 1 ? 0 : pair.queries.head;
  return (head * query_blocks_ + pair.queries.begin() / largest_.queries) *
             key_blocks_ +
         pair.keys.begin() / largest_.keys;
}

const void* StagedBias::Of(const PairRows& pair,
                           const simd::ScoreMatrix& matrix,
                           const simd::StagedShape& shape) const {
  const int64_t index = SlotOf(pair);
  Slot& slot = slot_[index];
  std::byte* const staged = staged_ + static_cast<size_t>(index) * slot_bytes_;
  if (forgets() || !SameMatrix(slot.matrix, matrix) ||
      !SameShape(slot.shape, shape)) {
    slot = {matrix, shape, staging_.stage_bias(matrix, shape, staged)};
  }
  return slot.any ? staged : nullptr;
}

}  // namespace fa2::attention
