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
#include "src/simd/direct/sums-inl.h"
#include "src/simd/math/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A compile-time size of a block.
template <int kValue>
using Size = std::integral_constant<int, kValue>;

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

// The first of two elements of 16 bits is the low half of 32.
inline constexpr bool kCanSplit =
    HWY_TARGET != HWY_SCALAR && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

template <typename T>
struct DirectBlocks : DirectSums<T> {
  using DirectSums<T>::Row;
  using typename DirectSums<T>::D;
  using typename DirectSums<T>::V;

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
    const auto whole = [&](size_t c) HWY_ATTR {
      if constexpr (kSplit) {
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
      } else {
        const V k0 = LoadWide(d, tag, ks[0] + c);
        if constexpr (kKeys == 4) {
          step(c, k0, LoadWide(d, tag, ks[1] + c), LoadWide(d, tag, ks[2] + c),
               LoadWide(d, tag, ks[3] + c));
        } else {
          step(c, k0, k0, k0, k0);
        }
      }
    };
    // Whole lines of the keys: the next ones are asked for line by line, and
    // what decides about that stays out of the loop (one query, D 64, f32 on
    // AVX2, keys in L2: 0.83 to 0.95 of the time).
    const size_t columns = kSplit ? 2 * lanes : lanes;
    const size_t line = HWY_MAX(columns, 64 / sizeof(typename Stored::Type));
    const bool reads = k + kKeys <= later.before;
    const auto* const next = reads ? later.data + k * later.stride : nullptr;
    size_t c = 0;
    for (; c + line <= depth; c += line) {
      if (reads) {
        for (int j = 0; j < kKeys; ++j) {
          hwy::Prefetch(next + j * later.stride + c);
        }
      }
      for (size_t of_line = 0; of_line < line; of_line += columns) {
        whole(c + of_line);
      }
    }
    // Not a function of both places: GCC 12 made bf16 on AVX512_BF16 8% slower
    // with it.
    if (reads && c < depth) {
      for (int j = 0; j < kKeys; ++j) {
        hwy::Prefetch(next + j * later.stride + c);
      }
    }
    for (; c + columns <= depth; c += columns) whole(c);
    if (!kSplit && c < depth) {
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
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
