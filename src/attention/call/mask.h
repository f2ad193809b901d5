// SPDX-License-Identifier: Apache-2.0

// Which keys a query sees, by position: causal masks and windows of both
// diagonals, as one interval of keys a query.
#ifndef FA2_SRC_ATTENTION_CALL_MASK_H_
#define FA2_SRC_ATTENTION_CALL_MASK_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "fa2/attention.h"
#include "src/common/integers.h"
#include "src/simd/engine.h"

namespace fa2::attention {

// Query i of a sequence of nq queries and nk keys sees the keys
// [i + lower, i + upper], clipped to [0, nk). Both ends grow with i, so what a
// block sees follows from its first and last row.
class Mask {
 public:
  // Offsets beyond any position: no bound.
  static constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 4;

  Mask() = default;
  Mask(const AttentionOptions& options, int64_t nq, int64_t nk)
      : nq_(nq), nk_(nk) {
    const int64_t diagonal = options.causal == Causal::kTopLeft ? 0 : nk - nq;
    if (options.causal != Causal::kNone) upper_ = diagonal;
    if (options.window_right >= 0 && options.window_right < kUnbounded) {
      upper_ = std::min(upper_, diagonal + options.window_right);
    }
    if (options.window_left >= 0 && options.window_left < kUnbounded) {
      lower_ = diagonal - options.window_left;
    }
  }

  bool operator==(const Mask& other) const {
    return nq_ == other.nq_ && nk_ == other.nk_ && lower_ == other.lower_ &&
           upper_ == other.upper_;
  }

  int64_t nq() const { return nq_; }
  int64_t nk() const { return nk_; }

  // Keys that query i sees.
  Interval Keys(int64_t i) const {
    return {std::clamp<int64_t>(i + lower_, 0, nk_),
            std::clamp<int64_t>(i + upper_ + 1, 0, nk_)};
  }

  // More keys than this no query sees.
  int64_t MostKeys() const {
    return std::clamp<int64_t>(upper_ - lower_ + 1, 0, nk_);
  }

  // Hull of the keys that any of the queries sees.
  Interval KeysOf(Interval queries) const {
    if (queries.empty()) return {};
    return {Keys(queries.begin).begin, Keys(queries.end - 1).end};
  }

  // Hull of the queries that see any of the keys.
  Interval QueriesOf(Interval keys) const {
    if (keys.empty()) return {};
    return {std::clamp<int64_t>(keys.begin - upper_, 0, nq_),
            std::clamp<int64_t>(keys.end - lower_, 0, nq_)};
  }

  // State of queries x keys; rows past nq do not count (their gradients vanish
  // and are dropped), keys past nk are hidden.
  simd::TileState State(Interval queries, Interval keys) const {
    queries.end = std::min(queries.end, nq_);
    if (queries.empty()) return simd::TileState::kHidden;
    const Interval first = Keys(queries.begin);
    const Interval last = Keys(queries.end - 1);
    if (last.end <= keys.begin || first.begin >= keys.end) {
      return simd::TileState::kHidden;
    }
    if (first.end >= keys.end && last.begin <= keys.begin) {
      return simd::TileState::kVisible;
    }
    return simd::TileState::kPartial;
  }

  // Number of visible (query, key) pairs of a block of rows and keys of the
  // sequence, for sharing out the work.
  double Pairs(Interval queries, Interval keys) const;
  double Pairs() const { return Pairs({0, nq_}, {0, nk_}); }  // of all

 private:
  int64_t nq_ = 0;
  int64_t nk_ = 0;
  int64_t lower_ = -kUnbounded;
  int64_t upper_ = kUnbounded;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_CALL_MASK_H_
