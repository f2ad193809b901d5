// SPDX-License-Identifier: Apache-2.0

// Elements of dropout's Philox stream: rows of multipliers, and bits.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_MATH_DROPOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_MATH_DROPOUT_INL_H_
#undef FA2_SRC_SIMD_MATH_DROPOUT_INL_H_
#else
#define FA2_SRC_SIMD_MATH_DROPOUT_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "src/simd/math/philox-inl.h"
#include "src/simd/score_types.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Keys of a row that are drawn at a time.
inline constexpr int64_t kStageKeys = 128;

// Elements [first, first + count) of a dropout stream as multipliers.
template <typename T>
class DropoutRow {
 public:
  explicit DropoutRow(const DropoutBlock& dropout)
      : seed_(dropout.seed),
        threshold_(PhiloxThreshold(dropout.p)),
        kept_(static_cast<T>(dropout.scale)) {}

  // count <= kStageKeys.
  HWY_INLINE void Get(uint64_t first, int64_t count, T* HWY_RESTRICT out) {
    const size_t skip = static_cast<size_t>(first % 4);
    PhiloxWords(seed_, first / 4, skip + static_cast<size_t>(count), words_);
    const uint32_t* HWY_RESTRICT words = words_ + skip;
    if (threshold_ > 0xFFFFFFFFu) {
      std::fill_n(out, count, T(0));
      return;
    }
    const uint32_t threshold = static_cast<uint32_t>(threshold_);
    for (int64_t i = 0; i < count; ++i) {
      out[i] = words[i] >= threshold ? kept_ : T(0);
    }
  }

 private:
  const uint64_t seed_;
  const uint64_t threshold_;
  const T kept_;
  // Room for a misaligned start and the last vector's excess.
  HWY_ALIGN uint32_t words_[kStageKeys + 2 * 4 * 64];
};

inline void KeepMask(double p, uint64_t seed, uint64_t first, int64_t count,
                     uint8_t* keep) {
  const DropoutBlock dropout{p, 1.0, seed, first, 0};
  DropoutRow<float> row(dropout);
  HWY_ALIGN float kept[kStageKeys];
  for (int64_t n = 0; n < count; n += kStageKeys) {
    const int64_t some = std::min(kStageKeys, count - n);
    row.Get(first + static_cast<uint64_t>(n), some, kept);
    for (int64_t i = 0; i < some; ++i) keep[n + i] = kept[i] != 0.0f;
  }
}

#if HWY_TARGET != HWY_SCALAR
// Where the rows of all queries begin at the same word of their blocks, lanes
// are queries: what is kept then lies as it is staged. Calls
// visit(key, query, kept) for whole vectors of queries and all keys, padding
// included; false when it cannot.
template <class Visit>
bool VisitKept(const DropoutBlock& dropout, const StagedShape& shape,
               const Visit& visit) {
  using D32 = hn::CappedTag<uint32_t, 16>;
  const D32 d32;
  const hn::Repartition<uint64_t, D32> d64;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d32));
  const uint64_t threshold = PhiloxThreshold(dropout.p);
  if (dropout.query_stride % 4 != 0 || shape.panel % lanes != 0 ||
      threshold == 0 || threshold > 0xFFFFFFFFu ||
      !dropout.SharesUpperWord(shape.queries, shape.keys)) {
    return false;
  }
  const auto dropped = hn::Set(d32, static_cast<uint32_t>(threshold - 1));
  const PhiloxKeys keys(dropout.seed, dropout.UpperWord());
  const int64_t skip = static_cast<int64_t>(dropout.first % 4);
  HWY_ALIGN uint64_t rows[2][8];
  for (int64_t q = 0; q < shape.padded_queries; q += lanes) {
    for (int64_t i = 0; i < lanes; ++i) {
      rows[i % 2][i / 2] = (dropout.first + static_cast<uint64_t>(q + i) *
                                                dropout.query_stride) /
                           4;
    }
    auto even = hn::Load(d64, rows[0]);
    auto odd = hn::Load(d64, rows[1]);
    const auto one = hn::Set(d64, 1);
    for (int64_t key = -skip; key < shape.padded_keys; key += 4) {
      hn::Vec<D32> word0, word1, word2, word3;
      PhiloxRows(d32, keys, even, odd, word0, word1, word2, word3);
      even = hn::Add(even, one);
      odd = hn::Add(odd, one);
      const auto put = [&](int64_t k, auto words) HWY_ATTR {
        if (k >= 0 && k < shape.padded_keys) {
          visit(k, q, d32, hn::Gt(words, dropped));
        }
      };
      put(key, word0);
      put(key + 1, word1);
      put(key + 2, word2);
      put(key + 3, word3);
    }
  }
  return true;
}
#endif

// StagingKernels::stage_dropout_bits.
inline void StageDropoutBits(const DropoutBlock& dropout,
                             const StagedShape& shape, void* staged) {
  uint32_t* const out = static_cast<uint32_t*>(staged);
  const auto at = [&](int64_t key, int64_t query) {
    return query / 32 * shape.padded_keys + key;
  };
#if HWY_TARGET != HWY_SCALAR
  // Masks of whole bytes.
  if (hn::Lanes(hn::CappedTag<uint32_t, 16>()) >= 8 &&
      VisitKept(dropout, shape,
                [&](int64_t key, int64_t query, auto d32, auto keep) HWY_ATTR {
                  hn::StoreMaskBits(
                      d32, keep,
                      reinterpret_cast<uint8_t*>(out + at(key, query)) +
                          query % 32 / 8);
                })) {
    return;
  }
#endif
  std::fill_n(out, shape.padded_queries / 32 * shape.padded_keys, 0u);
  DropoutRow<float> source(dropout);
  HWY_ALIGN float row[kStageKeys];
  for (int64_t q = 0; q < shape.queries; ++q) {
    for (int64_t k0 = 0; k0 < shape.keys; k0 += kStageKeys) {
      const int64_t count = std::min(kStageKeys, shape.keys - k0);
      source.Get(dropout.first +
                     static_cast<uint64_t>(q) * dropout.query_stride +
                     static_cast<uint64_t>(k0),
                 count, row);
      for (int64_t k = 0; k < count; ++k) {
        if (row[k] != 0.0f) out[at(k0 + k, q)] |= uint32_t{1} << q % 32;
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
