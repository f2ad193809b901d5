// SPDX-License-Identifier: Apache-2.0

// Sums of rows times weights in registers: of values, which a few rows of
// probabilities weigh, of queries, and of columns of turned keys.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_DIRECT_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_DIRECT_SUMS_INL_H_
#undef FA2_SRC_SIMD_DIRECT_SUMS_INL_H_
#else
#define FA2_SRC_SIMD_DIRECT_SUMS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "src/simd/direct/direct.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Registers for sums: 16 and what feeds them want 21.
inline constexpr int kDirectSums =
    (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3) ? 8 : 16;

// Weights of sums: that of sum i and term n lies at data[i * row + n * term].
template <typename T>
struct SumWeights {
  const T* data;
  int64_t row;
  int64_t term;
};

template <typename T>
struct DirectSums {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;

  static HWY_INLINE T* Row(const DirectRows& rows, int64_t r) {
    return static_cast<T*>(rows.data) + r * rows.stride;
  }

  // Sums i over n of the weights times load(n, c), for kRows rows and kVectors
  // vectors of columns, 1, 2 or 4: store(i, c, sum) takes each. With kSplit
  // `load` gives two vectors, the even and the odd columns of twice as many,
  // and so does what `store` takes.
  template <int kRows, int kVectors, bool kSplit = false, class LoadAt,
            class StoreAt>
  static HWY_INLINE void SumBlock(int64_t count, SumWeights<T> weights,
                                  const LoadAt& load, size_t c,
                                  const StoreAt& store) {
    const D d;
    const T* ws[kRows];
    for (int i = 0; i < kRows; ++i) ws[i] = weights.data + i * weights.row;
    const int64_t step = weights.term;
    const size_t lanes = hn::Lanes(d);
    // Few columns have several sums, of some terms each: one would wait for
    // itself.
    constexpr int kTerms = HWY_MIN(4, kDirectSums / kRows) / kVectors;
    static_assert(kTerms > 0, "more sums than registers");
    constexpr int kSums = kTerms * kVectors;
    V s00, s01, s02, s03, s10, s11, s12, s13;
    V s20, s21, s22, s23, s30, s31, s32, s33;
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = hn::Zero(d);
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = hn::Zero(d);
    int64_t n = 0;
    if constexpr (kTerms > 1) {
      const auto term = [&](int j) HWY_ATTR { return n + j / kVectors; };
      const auto vector = [&](int j) HWY_ATTR {
        return load(term(j), c + static_cast<size_t>(j % kVectors) * lanes);
      };
      for (; n + kTerms <= count; n += kTerms) {
        const V v0 = vector(0);
        const V v1 = vector(1);
        const V v2 = kSums > 2 ? vector(2) : v0;
        const V v3 = kSums > 2 ? vector(3) : v1;
#define FA2_ROW(i)                                                         \
  if constexpr (kRows > i) {                                               \
    const V w0 = hn::Set(d, ws[i][n * step]);                              \
    const V w1 = kVectors == 2 ? w0 : hn::Set(d, ws[i][(n + 1) * step]);   \
    s##i##0 = hn::MulAdd(w0, v0, s##i##0);                                 \
    s##i##1 = hn::MulAdd(w1, v1, s##i##1);                                 \
    if constexpr (kSums > 2) {                                             \
      const V w2 = hn::Set(d, ws[i][term(2) * step]);                      \
      const V w3 = kVectors == 2 ? w2 : hn::Set(d, ws[i][term(3) * step]); \
      s##i##2 = hn::MulAdd(w2, v2, s##i##2);                               \
      s##i##3 = hn::MulAdd(w3, v3, s##i##3);                               \
    }                                                                      \
  }
        FA2_ROW(0)
        FA2_ROW(1)
        FA2_ROW(2)
        FA2_ROW(3)
#undef FA2_ROW
      }
    }
    V v0, v1, v2, v3;
    const auto load_vectors = [&](int64_t of) HWY_ATTR {
      if constexpr (kSplit) {
        load(of, c, v0, v1);
        load(of, c + 2 * lanes, v2, v3);
      } else {
        v0 = v1 = v2 = v3 = load(of, c);
        if constexpr (kVectors >= 2) v1 = load(of, c + lanes);
        if constexpr (kVectors == 4) {
          v2 = load(of, c + 2 * lanes);
          v3 = load(of, c + 3 * lanes);
        }
      }
    };
    if constexpr (kRows == 1 && kVectors == 4) {  // two terms, likewise
      for (; n + 2 <= count; n += 2) {
        load_vectors(n);
        const V w0 = hn::Set(d, ws[0][n * step]);
        s00 = hn::MulAdd(w0, v0, s00);
        s01 = hn::MulAdd(w0, v1, s01);
        s02 = hn::MulAdd(w0, v2, s02);
        s03 = hn::MulAdd(w0, v3, s03);
        load_vectors(n + 1);
        const V w1 = hn::Set(d, ws[0][(n + 1) * step]);
        s10 = hn::MulAdd(w1, v0, s10);
        s11 = hn::MulAdd(w1, v1, s11);
        s12 = hn::MulAdd(w1, v2, s12);
        s13 = hn::MulAdd(w1, v3, s13);
      }
      s00 = hn::Add(s00, s10);
      s01 = hn::Add(s01, s11);
      s02 = hn::Add(s02, s12);
      s03 = hn::Add(s03, s13);
    }
    for (; n < count; ++n) {
      load_vectors(n);
#define FA2_ROW(i)                           \
  if constexpr (kRows > i) {                 \
    const V w = hn::Set(d, ws[i][n * step]); \
    s##i##0 = hn::MulAdd(w, v0, s##i##0);    \
    if constexpr (kVectors >= 2) {           \
      s##i##1 = hn::MulAdd(w, v1, s##i##1);  \
    }                                        \
    if constexpr (kVectors == 4) {           \
      s##i##2 = hn::MulAdd(w, v2, s##i##2);  \
      s##i##3 = hn::MulAdd(w, v3, s##i##3);  \
    }                                        \
  }
      FA2_ROW(0)
      FA2_ROW(1)
      FA2_ROW(2)
      FA2_ROW(3)
#undef FA2_ROW
    }
#define FA2_ROW(i)                                                   \
  if constexpr (kRows > i) {                                         \
    if constexpr (kTerms > 1 && kSums == 4) {                        \
      s##i##0 = hn::Add(s##i##0, kVectors == 2 ? s##i##2 : s##i##1); \
      s##i##1 = kVectors == 2 ? hn::Add(s##i##1, s##i##3)            \
                              : hn::Add(s##i##2, s##i##3);           \
    }                                                                \
    if constexpr (kVectors == 1 && kSums > 1) {                      \
      s##i##0 = hn::Add(s##i##0, s##i##1);                           \
    }                                                                \
    if constexpr (kSplit) {                                          \
      store(i, c, s##i##0, s##i##1);                                 \
      store(i, c + 2 * lanes, s##i##2, s##i##3);                     \
    } else {                                                         \
      store(i, c, s##i##0);                                          \
      if constexpr (kVectors >= 2) store(i, c + lanes, s##i##1);     \
      if constexpr (kVectors == 4) {                                 \
        store(i, c + 2 * lanes, s##i##2);                            \
        store(i, c + 3 * lanes, s##i##3);                            \
      }                                                              \
    }                                                                \
  }
    FA2_ROW(0)
    FA2_ROW(1)
    FA2_ROW(2)
    FA2_ROW(3)
#undef FA2_ROW
  }

  // One row's sums, as SumBlock makes them, of eight vectors of columns.
  template <bool kSplit, class LoadAt, class StoreAt>
  static HWY_INLINE void SumWideRow(int64_t count, SumWeights<T> weights,
                                    const LoadAt& load, size_t c,
                                    const StoreAt& store) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    V s0, s1, s2, s3, s4, s5, s6, s7;
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = hn::Zero(d);
    const T* w = weights.data;
    for (int64_t n = 0; n < count; ++n, w += weights.term) {
      const V weight = hn::Set(d, *w);
      const auto add_pair = [&](size_t vector, V& a, V& b) HWY_ATTR {
        V va, vb;
        if constexpr (kSplit) {
          load(n, c + vector * lanes, va, vb);
        } else {
          va = load(n, c + vector * lanes);
          vb = load(n, c + (vector + 1) * lanes);
        }
        a = hn::MulAdd(weight, va, a);
        b = hn::MulAdd(weight, vb, b);
      };
      add_pair(0, s0, s1);
      add_pair(2, s2, s3);
      add_pair(4, s4, s5);
      add_pair(6, s6, s7);
    }
    const auto store_pair = [&](size_t vector, V a, V b) HWY_ATTR {
      if constexpr (kSplit) {
        store(0, c + vector * lanes, a, b);
      } else {
        store(0, c + vector * lanes, a);
        store(0, c + (vector + 1) * lanes, b);
      }
    };
    store_pair(0, s0, s1);
    store_pair(2, s2, s3);
    store_pair(4, s4, s5);
    store_pair(6, s6, s7);
  }

  // Sums become, or are added to, rows of out from `first` on.
  static HWY_INLINE auto StoreIn(const DirectRows& out, int64_t first,
                                 bool add) {
    // By value: what is stored might else have changed them.
    return [rows = Row(out, first), stride = out.stride, add](int i, size_t c,
                                                              V sum) HWY_ATTR {
      const D d;
      T* const p = rows + i * stride + c;
      hn::Store(add ? hn::Add(sum, hn::Load(d, p)) : sum, d, p);
    };
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
