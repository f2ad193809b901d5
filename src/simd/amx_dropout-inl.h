// Dropout's bits for the backward pass on AMX, drawn a few at a time between
// the tile products of the slab before: Philox takes some 900 cycles of vector
// instructions for 32 x 32 elements, while the products of dV and dK leave the
// vector units idle.

// Included for one Highway target only, amx_target.h.
#ifndef FA2_SRC_SIMD_AMX_DROPOUT_INL_H_
#define FA2_SRC_SIMD_AMX_DROPOUT_INL_H_

#include <immintrin.h>

#include "src/simd/engine.h"
#include "src/simd/philox-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Bits of 64 keys and all queries of a block.
class SlabDropout {
 public:
  static constexpr int64_t kKeys = 64;
  static constexpr int64_t Bytes(int64_t query_panels) {
    return query_panels * kKeys * 4;
  }

  // Does nothing if the block has no dropout_stream.
  SlabDropout(const ScoreOptions& o, int64_t query_panels, void* bits)
      : dropout_(o.dropout_stream),
        given_(o.dropout_stream.p > 0.0),
        query_panels_(query_panels),
        bits_(static_cast<uint16_t*>(bits)),
        keys_(o.dropout_stream.seed) {
    if (!given_) return;
    dropped_ = static_cast<uint32_t>(PhiloxThreshold(dropout_.p) - 1);
    for (int i = 0; i < 16; ++i) {
      lane_[i % 2][i / 2] =
          static_cast<uint64_t>(i) * (dropout_.query_stride / 4);
    }
  }

  bool given() const { return given_; }
  // Of the first key of the slab, [32 keys ahead by 64][2 halves] a panel.
  const uint16_t* Panel(int64_t query_panel) const {
    return bits_ + query_panel * 2 * kKeys;
  }

  // Starts on the keys [key, key + kKeys) of the block.
  void Begin(int64_t key) {
    key_ = key;
    unit_ = 0;
    units_ = given_ ? 2 * query_panels_ * (kKeys / 4) : 0;
  }
  // Draws what is left of them.
  void Finish() {
    while (unit_ < units_) Unit();
  }
  // After four tile products.
  HWY_INLINE void Step() {
    if (unit_ < units_) {
      Unit();
      Unit();
    }
  }

 private:
  // 4 keys of 16 queries.
  HWY_NOINLINE void Unit() {
    const hn::FixedTag<uint64_t, 8> d64;
    const hn::FixedTag<uint32_t, 16> d32;
    const int64_t half = unit_ / (kKeys / 4);  // of a query panel
    const int64_t key = unit_ % (kKeys / 4) * 4;
    ++unit_;
    const auto first =
        hn::Set(d64, (dropout_.first + static_cast<uint64_t>(key_ + key)) / 4 +
                         static_cast<uint64_t>(16 * half) *
                             (dropout_.query_stride / 4));
    hn::Vec<decltype(d64)> e0, e1, e2, e3, o0, o1, o2, o3;
    PhiloxBlocks(d64, keys_, hn::Add(first, hn::Load(d64, lane_[0])), e0, e1,
                 e2, e3);
    PhiloxBlocks(d64, keys_, hn::Add(first, hn::Load(d64, lane_[1])), o0, o1,
                 o2, o3);
    uint16_t* bits = bits_ + half / 2 * 2 * kKeys + 2 * key + half % 2;
    bits[0] = Kept(PhiloxWord(d32, e0, o0));
    bits[2] = Kept(PhiloxWord(d32, e1, o1));
    bits[4] = Kept(PhiloxWord(d32, e2, o2));
    bits[6] = Kept(PhiloxWord(d32, e3, o3));
  }

  template <class V>
  HWY_INLINE uint16_t Kept(V words) const {
    return static_cast<uint16_t>(_mm512_cmpgt_epu32_mask(
        words.raw, _mm512_set1_epi32(static_cast<int>(dropped_))));
  }

  const DropoutBlock& dropout_;
  const bool given_;
  const int64_t query_panels_;
  uint16_t* const bits_;
  const PhiloxKeys keys_;
  HWY_ALIGN uint64_t lane_[2][8];  // blocks from the first query to the lanes'
  uint32_t dropped_ = 0;           // the greatest output that is dropped
  int64_t key_ = 0;
  int64_t unit_ = 0;
  int64_t units_ = 0;
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_DROPOUT_INL_H_
