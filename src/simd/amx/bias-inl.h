// SPDX-License-Identifier: Apache-2.0

// Bias in the unit of S = K Q^T on AMX: S + bias / scale, so that the passes
// over S are those of the plain pass. With the scores themselves they would
// have to tell -inf from other elements and to keep log2(e) apart.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_BIAS_INL_H_
#define FA2_SRC_SIMD_AMX_BIAS_INL_H_

#include <cmath>

#include "src/simd/amx/stream-inl.h"
#include "src/simd/amx/tile-inl.h"
#include "src/simd/amx/transpose-inl.h"
#include "src/simd/engine.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// The bias_stream of a block.
class BiasOfProducts {
 public:
  explicit BiasOfProducts(const ScoreOptions& o) : stream_(o.bias_stream) {
    const ScoreMatrix& m = stream_.matrix;
    const double scale = std::fabs(o.scale);
    // Ordinary elements stay finite.
    given_ = stream_.given() && scale > 0x1p-40 && scale < 0x1p40 &&
             (m.dtype == DType::kF32 || m.dtype == DType::kBF16 ||
              m.dtype == DType::kF16);
    if (!given_) return;
    size_ = static_cast<int64_t>(SizeOf(m.dtype));
    stride_ = m.query_stride * size_;
    unit_ = static_cast<float>(1.0 / o.scale);
  }

  // Whether sub-block (key, query), both in panels, can be Put.
  bool Fits(int64_t key, int64_t query) const {
    return given_ && IsWhole(StreamPart(stream_, key, query));
  }

  // A quarter of a sub-block, transposed, to tiles [key half][query half];
  // added to what is there if kAdd. Returns false, and what it has written is
  // of no use, if elements need more care, those of 2^17 and above, whose
  // rounding errors would multiply, infinite and NaN: -inf hides a key whatever
  // S is.
  template <bool kAdd>
  HWY_NOINLINE bool Put(int64_t key, int64_t query, int64_t quarter,
                        uint8_t* tiles) const {
    const int64_t half = quarter / 2;  // of the queries
    const int64_t key_half = quarter % 2;
    const uint8_t* const rows =
        static_cast<const uint8_t*>(stream_.matrix.data) +
        (32 * query + 16 * half) * stride_ + 32 * key * size_;
    uint8_t* const to = tiles + half * kTileBytes;
    if (stream_.matrix.dtype == DType::kBF16) {
      // One transposition serves both quarters of the queries.
      return key_half == 1 || PutPairs<kAdd>(rows, to);
    }
    const uint8_t* const square = rows + 16 * key_half * size_;
    uint8_t* const tile = to + key_half * 2 * kTileBytes;
    if (size_ == 2) {
      const hn::FixedTag<hwy::float16_t, 16> f16;
      Floats r[16];
      for (int i = 0; i < 16; ++i) {
        r[i] = hn::PromoteTo(
            FloatTag(), hn::LoadU(f16, reinterpret_cast<const hwy::float16_t*>(
                                           square + i * stride_)));
      }
      Transpose16x16(r);
      return PutRows<kAdd>(r, tile);
    }
    Floats v[16];
    LoadColumns(square, stride_, v);
    return PutRows<kAdd>(v, tile);
  }

 private:
  template <bool kAdd>
  HWY_INLINE void PutRow(Floats bias, uint8_t* to) const {
    const Floats unit = hn::Set(FloatTag(), unit_);
    StoreRow(kAdd ? hn::MulAdd(bias, unit, LoadRow(to)) : hn::Mul(bias, unit),
             to);
  }

  // 16 queries x 32 keys of bf16.
  template <bool kAdd>
  HWY_INLINE bool PutPairs(const uint8_t* rows, uint8_t* to) const {
    Floats v[16];
    LoadColumns(rows, stride_, v);
    const FloatTag d;
    const WordTag words;
    const Bf16Tag d16;
    Bf16s most = hn::Zero(d16);  // without signs, twice
    const Words high = hn::Set(words, 0xffff0000u);
    for (int c = 0; c < 16; ++c) {
      const Words pairs = hn::BitCast(words, v[c]);
      const Bf16s elements = hn::BitCast(d16, pairs);
      most = hn::Max(most, hn::Add(elements, elements));
      uint8_t* const row = to + c / 8 * 2 * kTileBytes + c % 8 * 128;
      PutRow<kAdd>(hn::BitCast(d, hn::ShiftLeft<16>(pairs)), row);
      PutRow<kAdd>(hn::BitCast(d, hn::And(pairs, high)), row + 64);
    }
    constexpr auto kMost = static_cast<uint16_t>((kLeast >> 15) - 1);
    return BitsOf(hn::Gt(most, hn::Set(d16, kMost))) == 0;
  }

  // The keys of a square.
  template <bool kAdd>
  HWY_INLINE bool PutRows(const Floats (&v)[16], uint8_t* to) const {
    const WordTag words;
    Words most = hn::Zero(words);  // without signs, twice
    for (int c = 0; c < 16; ++c) {
      const Words bits = hn::BitCast(words, v[c]);
      most = hn::Max(most, hn::Add(bits, bits));
      PutRow<kAdd>(v[c], to + 64 * c);
    }
    return BitsOf(hn::Gt(most, hn::Set(words, 2 * kLeast - 1))) == 0;
  }

  static constexpr uint32_t kLeast = 0x48000000;  // bits of 2^17
  const ScoreStream& stream_;
  int64_t size_ = 0;    // bytes of an element
  int64_t stride_ = 0;  // bytes from query to query
  float unit_ = 0.0f;   // 1 / scale
  bool given_ = false;
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_BIAS_INL_H_
