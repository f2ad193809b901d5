// SPDX-License-Identifier: Apache-2.0

// The products of direct.h, in blocks of registers: a vector of keys or values
// is widened once for all rows of a block.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_DIRECT_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_DIRECT_PRODUCTS_INL_H_
#undef FA2_SRC_SIMD_DIRECT_PRODUCTS_INL_H_
#else
#define FA2_SRC_SIMD_DIRECT_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "src/simd/direct/direct.h"
#include "src/simd/math/load-inl.h"
#include "src/simd/math/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A compile-time size of a block.
template <int kValue>
using Size = std::integral_constant<int, kValue>;

// Registers for sums: 4 x 4 vectors and what feeds them want 21.
inline constexpr int kDirectBlockRows =
    (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3) ? 2 : 4;

// Calls body(Size<rows>, first) for blocks of kDirectBlockRows rows and one of
// what is left.
template <class Body>
HWY_INLINE void ForRowBlocks(int64_t rows, const Body& body) {
  int64_t r = 0;
  for (; r + kDirectBlockRows <= rows; r += kDirectBlockRows) {
    body(Size<kDirectBlockRows>(), r);
  }
  if constexpr (kDirectBlockRows > 2) {
    if (r + 3 == rows) return body(Size<3>(), r);
    if (r + 2 == rows) return body(Size<2>(), r);
  }
  if (r < rows) body(Size<1>(), r);
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

template <typename T>
struct DirectProducts {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;

  template <class Stored>
  static HWY_INLINE const typename Stored::Type* Row(const Rows& rows,
                                                     int64_t k) {
    return static_cast<const typename Stored::Type*>(rows.data) +
           k * rows.stride;
  }
  static HWY_INLINE T* Row(const DirectRows& rows, int64_t r) {
    return static_cast<T*>(rows.data) + r * rows.stride;
  }

  // Products of kRows rows of x with kKeys keys, 1 or 4.
  template <int kRows, int kKeys, class Stored>
  static HWY_INLINE void MultiplyBlock(Stored tag, const DirectRows& x,
                                       int64_t r, const Rows& rows, int64_t k,
                                       const DirectRows& products) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t depth = static_cast<size_t>(rows.depth);
    const T* xs[kRows];
    for (int i = 0; i < kRows; ++i) xs[i] = Row(x, r + i);
    const typename Stored::Type* ks[kKeys];
    for (int j = 0; j < kKeys; ++j) ks[j] = Row<Stored>(rows, k + j);
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
    for (; c + lanes <= depth; c += lanes) {
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

  // Up to so many columns, of several rows of x, keys are better turned to lie
  // along the lanes: sums of lanes take more than the products that they end.
  static constexpr size_t kShallow = 32;
  static HWY_INLINE bool IsShallow(const DirectRows& x, const Rows& rows) {
#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE
    (void)x, (void)rows;
    return false;
#else
    const size_t lanes = hn::Lanes(D());
    return sizeof(T) == 4 && x.rows > 2 && lanes <= kShallow &&
           rows.depth <= static_cast<int64_t>(std::min(kShallow, 2 * lanes));
#endif
  }

  template <class Stored>
  static HWY_INLINE void MultiplyShallow(Stored tag, const DirectRows& x,
                                         const Rows& rows,
                                         const DirectRows& products) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t depth = static_cast<size_t>(rows.depth);
    HWY_ALIGN T wide[kDirectKeys * kShallow];
    HWY_ALIGN T across[kShallow * kDirectKeys];
    const size_t columns = (depth + lanes - 1) / lanes * lanes;
    size_t keys = static_cast<size_t>(rows.rows);
    const T* in = wide;
    int64_t stride = static_cast<int64_t>(columns);
    if constexpr (std::is_same_v<typename Stored::Type, T>) {
      if (depth % lanes == 0 && keys % lanes == 0) {  // as they lie
        in = Row<Stored>(rows, 0);
        stride = rows.stride;
      }
    }
    if (in == wide) {
      size_t k = 0;
      for (; k < keys; ++k) {
        const auto* row = Row<Stored>(rows, static_cast<int64_t>(k));
        T* const to = wide + k * columns;
        size_t c = 0;
        for (; c + lanes <= depth; c += lanes) {
          hn::Store(LoadWide(d, tag, row + c), d, to + c);
        }
        if (c < depth) {
          hn::Store(LoadWideTail(d, tag, row + c, depth - c), d, to + c);
        }
      }
      keys = (keys + lanes - 1) / lanes * lanes;
      std::fill(wide + k * columns, wide + keys * columns, T(0));
    }
    Transpose(in, stride, static_cast<int64_t>(keys),
              static_cast<int64_t>(columns), across, kDirectKeys);
    const auto weight = [&](int64_t r, int64_t n)
                            HWY_ATTR { return Row(x, r)[n]; };
    const auto load = [&](int64_t n, size_t c) HWY_ATTR {
      return hn::Load(d, across + n * kDirectKeys + c);
    };
    ForRowBlocks(x.rows, [&](auto size, int64_t r) HWY_ATTR {
      size_t c = 0;
      for (; c + 4 * lanes <= keys; c += 4 * lanes) {
        SumBlock<size(), 4>(rows.depth, weight, load, false, products, r, c);
      }
      for (; c < keys; c += lanes) {
        SumBlock<size(), 1>(rows.depth, weight, load, false, products, r, c);
      }
    });
  }

  static void Multiply(const DirectRows& x, const Rows& rows,
                       DirectRows products) {
    WithStored<T>(rows.dtype, [&](auto tag) HWY_ATTR {
      if (IsShallow(x, rows)) return MultiplyShallow(tag, x, rows, products);
      int64_t k = 0;
      for (; k + 4 <= rows.rows; k += 4) {
        ForRowBlocks(x.rows, [&](auto size, int64_t r) HWY_ATTR {
          MultiplyBlock<size(), 4>(tag, x, r, rows, k, products);
        });
      }
      for (; k < rows.rows; ++k) {
        ForRowBlocks(x.rows, [&](auto size, int64_t r) HWY_ATTR {
          MultiplyBlock<size(), 1>(tag, x, r, rows, k, products);
        });
      }
    });
  }

  // out[r + i][c ...] = (add ? out : 0) + sum over n of w(i, n) load(n, c), for
  // kRows rows and kVectors vectors of columns.
  template <int kRows, int kVectors, class Weight, class LoadAt>
  static HWY_INLINE void SumBlock(int64_t count, const Weight& weight,
                                  const LoadAt& load, bool add,
                                  const DirectRows& out, int64_t r, size_t c) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    T* to[kRows];
    for (int i = 0; i < kRows; ++i) to[i] = Row(out, r + i) + c;
    V s00, s01, s02, s03, s10, s11, s12, s13;
    V s20, s21, s22, s23, s30, s31, s32, s33;
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = hn::Zero(d);
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = hn::Zero(d);
    int64_t n = 0;
    if constexpr (kVectors == 1) {
      // Four terms at a time: one sum a row would wait for itself.
      for (; n + 4 <= count; n += 4) {
        const V v0 = load(n, c), v1 = load(n + 1, c);
        const V v2 = load(n + 2, c), v3 = load(n + 3, c);
#define FA2_ROW(i)                                                       \
  if constexpr (kRows > i) {                                             \
    s##i##0 = hn::MulAdd(hn::Set(d, weight(r + i, n)), v0, s##i##0);     \
    s##i##1 = hn::MulAdd(hn::Set(d, weight(r + i, n + 1)), v1, s##i##1); \
    s##i##2 = hn::MulAdd(hn::Set(d, weight(r + i, n + 2)), v2, s##i##2); \
    s##i##3 = hn::MulAdd(hn::Set(d, weight(r + i, n + 3)), v3, s##i##3); \
  }
        FA2_ROW(0)
        FA2_ROW(1)
        FA2_ROW(2)
        FA2_ROW(3)
#undef FA2_ROW
      }
    }
    for (; n < count; ++n) {
      const V v0 = load(n, c);
      V v1 = v0, v2 = v0, v3 = v0;
      if constexpr (kVectors == 4) {
        v1 = load(n, c + lanes);
        v2 = load(n, c + 2 * lanes);
        v3 = load(n, c + 3 * lanes);
      }
#define FA2_ROW(i)                            \
  if constexpr (kRows > i) {                  \
    const V w = hn::Set(d, weight(r + i, n)); \
    s##i##0 = hn::MulAdd(w, v0, s##i##0);     \
    if constexpr (kVectors == 4) {            \
      s##i##1 = hn::MulAdd(w, v1, s##i##1);   \
      s##i##2 = hn::MulAdd(w, v2, s##i##2);   \
      s##i##3 = hn::MulAdd(w, v3, s##i##3);   \
    }                                         \
  }
      FA2_ROW(0)
      FA2_ROW(1)
      FA2_ROW(2)
      FA2_ROW(3)
#undef FA2_ROW
    }
    if constexpr (kVectors == 1) {
#define FA2_ROW(i)                                                           \
  if constexpr (kRows > i) {                                                 \
    s##i##0 = hn::Add(hn::Add(s##i##0, s##i##1), hn::Add(s##i##2, s##i##3)); \
  }
      FA2_ROW(0)
      FA2_ROW(1)
      FA2_ROW(2)
      FA2_ROW(3)
#undef FA2_ROW
    }
    const auto store = [&](V sum, T* p) HWY_ATTR {
      hn::Store(add ? hn::Add(sum, hn::Load(d, p)) : sum, d, p);
    };
#define FA2_ROW(i)                       \
  if constexpr (kRows > i) {             \
    store(s##i##0, to[i]);               \
    if constexpr (kVectors == 4) {       \
      store(s##i##1, to[i] + lanes);     \
      store(s##i##2, to[i] + 2 * lanes); \
      store(s##i##3, to[i] + 3 * lanes); \
    }                                    \
  }
    FA2_ROW(0)
    FA2_ROW(1)
    FA2_ROW(2)
    FA2_ROW(3)
#undef FA2_ROW
  }

  static void Combine(const DirectRows& weights, const Rows& rows,
                      DirectRows out) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t depth = static_cast<size_t>(rows.depth);
    const auto weight = [&](int64_t r, int64_t n)
                            HWY_ATTR { return Row(weights, r)[n]; };
    WithStored<T>(rows.dtype, [&](auto tag) HWY_ATTR {
      using Stored = decltype(tag);
      const auto whole = [&](int64_t n, size_t c) HWY_ATTR {
        return LoadWide(d, tag, Row<Stored>(rows, n) + c);
      };
      ForRowBlocks(weights.rows, [&](auto size, int64_t r) HWY_ATTR {
        size_t c = 0;
        for (; c + 4 * lanes <= depth; c += 4 * lanes) {
          SumBlock<size(), 4>(rows.rows, weight, whole, true, out, r, c);
        }
        for (; c + lanes <= depth; c += lanes) {
          SumBlock<size(), 1>(rows.rows, weight, whole, true, out, r, c);
        }
        if (c < depth) {
          const auto tail = [&](int64_t n, size_t first) HWY_ATTR {
            return LoadWideTail(d, tag, Row<Stored>(rows, n) + first,
                                depth - first);
          };
          SumBlock<size(), 1>(rows.rows, weight, tail, true, out, r, c);
        }
      });
    });
  }

  static void Spread(const DirectRows& weights, int64_t keys,
                     const DirectRows& x, int64_t depth, DirectRows out) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const auto weight = [&](int64_t k, int64_t n)
                            HWY_ATTR { return Row(weights, n)[k]; };
    const auto load = [&](int64_t n, size_t c)
                          HWY_ATTR { return hn::Load(d, Row(x, n) + c); };
    ForRowBlocks(keys, [&](auto size, int64_t k) HWY_ATTR {
      size_t c = 0;
      for (; c + 4 * lanes <= static_cast<size_t>(depth); c += 4 * lanes) {
        SumBlock<size(), 4>(x.rows, weight, load, false, out, k, c);
      }
      for (; c < static_cast<size_t>(depth); c += lanes) {
        SumBlock<size(), 1>(x.rows, weight, load, false, out, k, c);
      }
    });
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
