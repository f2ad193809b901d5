// SPDX-License-Identifier: Apache-2.0

// Strips of keys, the unit of the forward pass on AMX: which sub-blocks they
// hold, and their operands in O^T += V^T P^T.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_STRIP_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_STRIP_INL_H_

#include <algorithm>

#include "src/simd/amx/products-inl.h"
#include "src/simd/amx/visibility.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

inline constexpr int64_t kMostStripPanels = 8;

// What S of a sub-block holds besides products, see BiasOfProducts.
enum class SumState : uint8_t {
  kNone,
  kBias,
  kPartOfBias,  // and is of no use
};

// Up to kMostStripPanels sub-blocks of one query panel, none of them hidden,
// within one chunk of keys.
struct Strip {
  int64_t query = -1;  // panel, -1: no strip
  int64_t chunk = 0;   // first key panel of the chunk
  int64_t in_chunk = 0;
  int64_t count = 0;
  int64_t key[kMostStripPanels] = {};  // panels
  SumState sum[kMostStripPanels] = {};
  bool first = false;  // of its query panel
  // Scores have been rounded into the place of S, see kLargeScore.
  bool large = false;
  // No hidden sub-blocks between those of the strip.
  bool unbroken() const { return key[count - 1] - key[0] == count - 1; }
};

// Gives out the strips of a block, query panel by query panel.
class StripCursor {
 public:
  // `keys` and `chunk` in panels; `most` of them to a strip.
  StripCursor(const SubBlockMap& sub_blocks, int64_t keys, int64_t chunk,
              int64_t most)
      : sub_blocks_(sub_blocks), keys_(keys), chunk_(chunk), most_(most) {}

  // The next strip, or none. Calls unseeing(query) for the query panels on the
  // way that see nothing.
  template <class Unseeing>
  void Next(Strip& strip, const Unseeing& unseeing) {
    strip.query = -1;
    strip.count = 0;
    strip.large = false;
    for (; query_ < sub_blocks_.queries; ++query_, key_ = 0, chunk_end_ = 0) {
      while (key_ < keys_ && strip.count < most_) {
        if (key_ == chunk_end_) {
          if (strip.count > 0) break;
          chunk_begin_ = key_;
          chunk_end_ = std::min(key_ + chunk_, keys_);
        }
        if (!sub_blocks_.At(key_, query_).hidden()) {
          strip.sum[strip.count] = SumState::kNone;
          strip.key[strip.count++] = key_;
        }
        ++key_;
      }
      if (strip.count > 0) {
        strip.query = query_;
        strip.chunk = chunk_begin_;
        strip.in_chunk = chunk_end_ - chunk_begin_;
        strip.first = !started_;
        started_ = true;
        return;
      }
      if (!started_) unseeing(query_);
      started_ = false;
    }
  }

 private:
  const SubBlockMap sub_blocks_;
  const int64_t keys_, chunk_, most_;
  int64_t query_ = 0;
  int64_t key_ = 0;
  int64_t chunk_begin_ = 0, chunk_end_ = 0;  // of the next key, or just before
  bool started_ = false;  // a strip of the query panel has been given out
};

// V^T as left operand over a strip's keys, unless it is unbroken: i is the 16
// columns of V, k indexes the strip.
template <int kTermCount>
struct StripValues {
  static constexpr int kTerms = kTermCount;
  const uint8_t* base;  // of the chunk and the first column tile
  int64_t term_bytes;
  int64_t column_bytes;
  const Strip& strip;
  template <class Tiles, int kRegister>
  HWY_INLINE void Load(int term, int64_t i, int64_t k) const {
    Tiles::template LoadStreaming<kRegister>(
        base + term * term_bytes + i * column_bytes +
            (strip.key[k] - strip.chunk) * kTileBytes,
        64);
  }
};

// Where P of the sub-blocks of strips is: that of the first kTwice has two
// places by turns, since it is written while that of the strip before is still
// read.
template <int64_t kTwice>
constexpr int64_t PairPlace(int64_t turn, int64_t i) {
  return i < kTwice ? turn * kTwice + i : kTwice + i;
}

// P of a strip as right operand: i is the query half.
template <int kTermCount, int64_t kTwice>
struct StripPairs {
  static constexpr int kTerms = kTermCount;
  StripPairs(const uint8_t* p, int64_t term_bytes, int64_t turn)
      : early(At(p, turn, 0)),
        late(At(p, turn, kTwice)),
        term_bytes(term_bytes) {}
  // Sub-block k is 2 k tiles from here.
  const uint8_t* early;
  const uint8_t* late;
  int64_t term_bytes;
  template <class Tiles, int kRegister>
  HWY_INLINE void Load(int term, int64_t i, int64_t k) const {
    Tiles::template Load<kRegister>((k < kTwice ? early : late) +
                                        term * term_bytes +
                                        (2 * k + i) * kTileBytes,
                                    64);
  }

 private:
  // Where sub-block 0 would be, were all places like that of sub-block k.
  static HWY_INLINE const uint8_t* At(const uint8_t* p, int64_t turn,
                                      int64_t k) {
    return p + (PairPlace<kTwice>(turn, k) - k) * 2 * kTileBytes;
  }
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_STRIP_INL_H_
