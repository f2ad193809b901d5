// SPDX-License-Identifier: Apache-2.0

// Blocks of registers of the products of direct.h: a vector of keys or values
// is widened once for all rows of a block.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_DIRECT_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_DIRECT_BLOCKS_INL_H_
#undef FA2_SRC_SIMD_DIRECT_BLOCKS_INL_H_
#else
#define FA2_SRC_SIMD_DIRECT_BLOCKS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "src/simd/direct/direct.h"
#include "src/simd/math/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A compile-time size of a block.
template <int kValue>
using Size = std::integral_constant<int, kValue>;

// Registers for sums: 16 and what feeds them want 21.
inline constexpr int kDirectSums =
    (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3) ? 8 : 16;
// Rows of a block of four vectors of columns, and of one of one or two.
inline constexpr int kDirectBlockRows = kDirectSums / 4;
inline constexpr int kNarrowBlockRows = 4;

// Calls body(Size<rows>, first) for blocks of kBlockRows rows and one of what
// is left.
template <int kBlockRows = kDirectBlockRows, class Body>
HWY_INLINE void ForRowBlocks(int64_t rows, const Body& body) {
  int64_t r = 0;
  for (; r + kBlockRows <= rows; r += kBlockRows) {
    body(Size<kBlockRows>(), r);
  }
  if constexpr (kBlockRows > 2) {
    if (r + 3 == rows) return body(Size<3>(), r);
    if (r + 2 == rows) return body(Size<2>(), r);
  }
  if (r < rows) body(Size<1>(), r);
}

// The same for blocks of `depth` columns. One call of each size, where that
// can be: GCC does not inline a body that has two.
template <class Body>
HWY_INLINE void ForRowBlocksOf(size_t depth, size_t lanes, int64_t rows,
                               const Body& body) {
  if constexpr (kNarrowBlockRows != kDirectBlockRows) {
    if (depth <= 2 * lanes) return ForRowBlocks<kNarrowBlockRows>(rows, body);
  }
  ForRowBlocks(rows, body);
}

#if HWY_TARGET != HWY_SCALAR && !HWY_HAVE_SCALABLE
// Adds up a vector's blocks of 128 bits.
template <class D, class V>
HWY_INLINE void StoreBlockSums(D d, V v, hn::TFromD<D>* sums) {
  if constexpr (hn::MaxLanes(d) * sizeof(hn::TFromD<D>) > 16) {
    const hn::Half<D> half;
    StoreBlockSums(
        half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), sums);
  } else {
    hn::StoreU(v, d, sums);
  }
}
#endif

// Sums of the lanes of four vectors.
template <class D, class V>
HWY_INLINE void StoreLaneSums(D d, V a, V b, V c, V e, hn::TFromD<D>* sums) {
#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE
  sums[0] = hn::GetLane(hn::SumOfLanes(d, a));
  sums[1] = hn::GetLane(hn::SumOfLanes(d, b));
  sums[2] = hn::GetLane(hn::SumOfLanes(d, c));
  sums[3] = hn::GetLane(hn::SumOfLanes(d, e));
#else
  // A block of 128 bits of each, added up in transposing them.
  const auto pair = [d](auto x, auto y) HWY_ATTR {
    return hn::Add(hn::InterleaveLower(d, x, y), hn::InterleaveUpper(d, x, y));
  };
  const auto ab = pair(a, b);
  const auto ce = pair(c, e);
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    const hn::Repartition<double, D> d64;
    const auto x = hn::BitCast(d64, ab);
    const auto y = hn::BitCast(d64, ce);
    const auto blocks = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, x, y)),
                                hn::BitCast(d, hn::InterleaveUpper(d64, x, y)));
    StoreBlockSums(d, blocks, sums);
  } else {
    StoreBlockSums(d, ab, sums);
    StoreBlockSums(d, ce, sums + 2);
  }
#endif
}

template <class Stored>
HWY_INLINE const typename Stored::Type* KeyRow(const Rows& rows, int64_t k) {
  return static_cast<const typename Stored::Type*>(rows.data) + k * rows.stride;
}

// Rows, from one that is read, of those that are prefetched: 2 KiB of 64
// bf16. On Emerald Rapids 16, 32, 64 and 128 take 100, 100, 104 and 121 us for
// one query of 12 heads of 1,024 keys, and 118 without.
inline constexpr int64_t kAhead = 16;

// The next rows of keys or values while others are read. By value where it is
// used: a loop over rows then steps one pointer.
template <class Stored>
struct LaterRows {
  // Of rows before `end`.
  LaterRows(const Rows& rows, int64_t end)
      : stride(rows.stride), before(end - kAhead) {
    // The stride of a single row may be anything.
    if (before > 0) data = KeyRow<Stored>(rows, kAhead);
  }

  // These while row r of queries is multiplied: only the first ones read ahead.
  HWY_INLINE LaterRows For(int64_t r) const {
    LaterRows later = *this;
    if (r > 0) later.before = 0;
    return later;
  }

  // Prefetches the line that begins at column c of row k + kAhead, if that is
  // before the end. Not a run's rows at once: they would wait for each other.
  HWY_INLINE void Read(int64_t k, size_t c) const {
    if (k < before && c * sizeof(typename Stored::Type) % 64 == 0) {
      hwy::Prefetch(data + k * stride + c);
    }
  }

  const typename Stored::Type* data = nullptr;
  int64_t stride;
  int64_t before;
};

// Weights of sums: that of sum i and term n lies at data[i * row + n * term].
template <typename T>
struct SumWeights {
  const T* data;
  int64_t row;
  int64_t term;
};

// The first of two elements of 16 bits is the low half of 32.
inline constexpr bool kCanSplit =
    HWY_TARGET != HWY_SCALAR && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

template <typename T>
struct DirectBlocks {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;

  static HWY_INLINE T* Row(const DirectRows& rows, int64_t r) {
    return static_cast<T*>(rows.data) + r * rows.stride;
  }

  // Whether two vectors come from one load, its even elements and its odd ones:
  // a shift and a mask, where to widen each half takes a shuffle more.
  template <class Stored>
  static constexpr bool kSplits = std::is_same_v<Stored, StoredBF16> &&
                                  sizeof(T) == 4 && kCanSplit;
  static HWY_INLINE void LoadSplit(const uint16_t* p, V& even, V& odd) {
    const D d;
    const hn::RebindToUnsigned<D> du;
    const hn::Repartition<uint16_t, D> d16;
    const auto both = hn::BitCast(du, hn::LoadU(d16, p));
    even = hn::BitCast(d, hn::ShiftLeft<16>(both));
    odd = hn::BitCast(
        d, hn::And(both, hn::Set(du, static_cast<uint32_t>(0xFFFF0000))));
  }

  // Products of kRows rows of x with kKeys keys, 1 or 4. With kSplit the
  // vectors of x are in LoadSplit's order, and there is an even number of them.
  template <int kRows, int kKeys, bool kSplit, class Stored>
  static HWY_INLINE void MultiplyBlock(Stored tag, const DirectRows& x,
                                       int64_t r, const Rows& rows, int64_t k,
                                       LaterRows<Stored> later,
                                       const DirectRows& products) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t depth = static_cast<size_t>(rows.depth);
    const T* xs[kRows];
    for (int i = 0; i < kRows; ++i) xs[i] = Row(x, r + i);
    const typename Stored::Type* ks[kKeys];
    for (int j = 0; j < kKeys; ++j) ks[j] = KeyRow<Stored>(rows, k + j);
    V s00, s01, s02, s03, s10, s11, s12, s13;
    V s20, s21, s22, s23, s30, s31, s32, s33;
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = hn::Zero(d);
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = hn::Zero(d);
    const auto step = [&](size_t c, V k0, V k1, V k2, V k3) HWY_ATTR {
#define FA2_ROW(i)                          \
  if constexpr (kRows > i) {                \
    const V q = hn::Load(d, xs[i] + c);     \
    s##i##0 = hn::MulAdd(q, k0, s##i##0);   \
    if constexpr (kKeys == 4) {             \
      s##i##1 = hn::MulAdd(q, k1, s##i##1); \
      s##i##2 = hn::MulAdd(q, k2, s##i##2); \
      s##i##3 = hn::MulAdd(q, k3, s##i##3); \
    }                                       \
  }
      FA2_ROW(0)
      FA2_ROW(1)
      FA2_ROW(2)
      FA2_ROW(3)
#undef FA2_ROW
    };
    size_t c = 0;
    if constexpr (kSplit) {
      for (; c < depth; c += 2 * lanes) {
        for (int j = 0; j < kKeys; ++j) later.Read(k + j, c);
        V even0, odd0;
        LoadSplit(ks[0] + c, even0, odd0);
        V even1 = even0, even2 = even0, even3 = even0;
        V odd1 = odd0, odd2 = odd0, odd3 = odd0;
        if constexpr (kKeys == 4) {
          LoadSplit(ks[1] + c, even1, odd1);
          LoadSplit(ks[2] + c, even2, odd2);
          LoadSplit(ks[3] + c, even3, odd3);
        }
        step(c, even0, even1, even2, even3);
        step(c + lanes, odd0, odd1, odd2, odd3);
      }
    }
    for (; c + lanes <= depth; c += lanes) {
      for (int j = 0; j < kKeys; ++j) later.Read(k + j, c);
      const V k0 = LoadWide(d, tag, ks[0] + c);
      if constexpr (kKeys == 4) {
        step(c, k0, LoadWide(d, tag, ks[1] + c), LoadWide(d, tag, ks[2] + c),
             LoadWide(d, tag, ks[3] + c));
      } else {
        step(c, k0, k0, k0, k0);
      }
    }
    if (c < depth) {
      const size_t left = depth - c;
      const V k0 = LoadWideTail(d, tag, ks[0] + c, left);
      if constexpr (kKeys == 4) {
        step(c, k0, LoadWideTail(d, tag, ks[1] + c, left),
             LoadWideTail(d, tag, ks[2] + c, left),
             LoadWideTail(d, tag, ks[3] + c, left));
      } else {
        step(c, k0, k0, k0, k0);
      }
    }
#define FA2_ROW(i)                                              \
  if constexpr (kRows > i) {                                    \
    T* const to = Row(products, r + i) + k;                     \
    if constexpr (kKeys == 4) {                                 \
      StoreLaneSums(d, s##i##0, s##i##1, s##i##2, s##i##3, to); \
    } else {                                                    \
      *to = hn::GetLane(hn::SumOfLanes(d, s##i##0));            \
    }                                                           \
  }
    FA2_ROW(0)
    FA2_ROW(1)
    FA2_ROW(2)
    FA2_ROW(3)
#undef FA2_ROW
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
