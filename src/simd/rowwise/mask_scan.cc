// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/rowwise/mask_scan.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/highway.h"
#include "src/simd/rowwise/mask_scan.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Bits: of the size of an element.
template <typename Bits>
class MaskScanner {
 public:
  explicit MaskScanner(const ScoreMatrix& mask) : mask_(mask) {}

  bool Run(int64_t queries, int64_t keys, TileState* states) {
    for (int64_t key = 0; key < keys; key += kKeys) {
      const int64_t count = std::min(kKeys, keys - key);
      std::memset(shown_, 0, sizeof shown_);
      std::memset(hidden_, 0, sizeof hidden_);
      for (int64_t query = 0; query < queries; ++query) {
        if (!See(Row(query, key, count), count)) return false;
      }
      // What the last vector has made of elements that there are not.
      const size_t rest = static_cast<size_t>(kKeys - count) * sizeof(Bits);
      std::memset(shown_ + count, 0, rest);
      std::memset(hidden_ + count, 0, rest);
      for (int64_t k = 0; k < count; k += kTileKeys) {
        *states++ = !Any(shown_ + k)   ? TileState::kHidden
                    : Any(hidden_ + k) ? TileState::kPartial
                                       : TileState::kVisible;
      }
    }
    return true;
  }

 private:
  // Keys at a time, whole vectors: enough of a row for its lines to come ahead,
  // and few enough for what is known of them to stay in L1.
  static constexpr int64_t kKeys = 512;

  const Bits* Row(int64_t query, int64_t key, int64_t count) {
    const Bits* const row = static_cast<const Bits*>(mask_.data) +
                            query * mask_.query_stride + key * mask_.key_stride;
    if (mask_.key_stride == 1 && count == kKeys) return row;
    for (int64_t k = 0; k < count; ++k) row_[k] = row[k * mask_.key_stride];
    return row_;
  }

  // What a row says of its keys joins shown_ and hidden_; whether it is one of
  // a mask.
  bool See(const Bits* row, int64_t count) {
    const hn::ScalableTag<Bits> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    const auto hides = hn::Set(d, static_cast<Bits>(HidingBits(mask_.dtype)));
    auto added = hn::Zero(d);  // but for the sign
    for (int64_t k = 0; k < count; k += lanes) {
      const auto elements = hn::LoadU(d, row + k);
      const auto hit = hn::VecFromMask(d, hn::Eq(elements, hides));
      hn::Store(hn::Or(hn::Load(d, hidden_ + k), hit), d, hidden_ + k);
      hn::Store(hn::Or(hn::Load(d, shown_ + k), hn::Not(hit)), d, shown_ + k);
      added = hn::Or(added, hn::AndNot(hit, hn::Add(elements, elements)));
    }
    return mask_.dtype == DType::kBool ||
           hn::AllTrue(d, hn::Eq(added, hn::Zero(d)));
  }

  // Whether any bit of a tile's keys is set.
  static bool Any(const Bits* keys) {
    uint64_t words[kTileKeys * sizeof(Bits) / sizeof(uint64_t)];
    std::memcpy(words, keys, sizeof words);
    uint64_t any = 0;
    for (const uint64_t word : words) any |= word;
    return any != 0;
  }

  const ScoreMatrix& mask_;
  // All bits of those keys that some query sees, and does not see.
  HWY_ALIGN Bits shown_[kKeys];
  HWY_ALIGN Bits hidden_[kKeys];
  Bits row_[kKeys] = {};  // unless as many keys are side by side
};

bool ScanMask(const ScoreMatrix& mask, int64_t queries, int64_t keys,
              TileState* states) {
  switch (SizeOf(mask.dtype)) {
    case 1:
      return MaskScanner<uint8_t>(mask).Run(queries, keys, states);
    case 2:
      return MaskScanner<uint16_t>(mask).Run(queries, keys, states);
    case 4:
      return MaskScanner<uint32_t>(mask).Run(queries, keys, states);
    default:
      return MaskScanner<uint64_t>(mask).Run(queries, keys, states);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "src/simd/target.h"

namespace fa2::simd {

HWY_EXPORT(ScanMask);

MaskScan MaskScanFor(int64_t targets) {
  return FA2_TARGET_FUNCTION(ScanMask, targets);
}

}  // namespace fa2::simd

#endif  // HWY_ONCE
