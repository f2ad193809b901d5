// SPDX-License-Identifier: Apache-2.0

// The products of direct.h, of the blocks of blocks-inl.h: keys as they lie, in
// halves that one load gives, or turned along the lanes.

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

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "src/simd/direct/blocks-inl.h"
#include "src/simd/direct/direct.h"
#include "src/simd/direct/widen-inl.h"
#include "src/simd/math/load-inl.h"
#include "src/simd/math/store-inl.h"
#include "src/simd/math/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
struct DirectProducts : DirectBlocks<T> {
  using Blocks = DirectBlocks<T>;
  using Blocks::LoadSplit;
  using Blocks::Row;
  using typename Blocks::D;
  using typename Blocks::V;
  using Own = StoredAs<T>;
  template <class Stored>
  static constexpr bool kSplits = Blocks::template kSplits<Stored>;

  // For many rows of x, and for short keys, keys are better turned to lie along
  // the lanes: the sums of lanes of a row take longer.
  static HWY_INLINE bool IsTurned(const DirectRows& x, const Rows& rows) {
#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE
    (void)x, (void)rows;
    return false;
#else
    return sizeof(T) == 4 && rows.depth > 0 &&
           x.rows * static_cast<int64_t>(hn::Lanes(D())) > 2 * rows.depth;
#endif
  }

  // Columns that are turned at once: with the products they stay in L1.
  static constexpr int64_t kTurned = 64;

  // Products with `columns` columns of the keys from `first` on, added to those
  // of the columns before. Of the keys behind them as many at most are
  // prefetched.
  template <class Stored>
  static HWY_INLINE void MultiplyTurned(Stored tag, const DirectRows& x,
                                        const Rows& rows, int64_t first,
                                        int64_t columns, int64_t following,
                                        const DirectRows& products) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    HWY_ALIGN T wide[kDirectKeyBlock * kTurned];
    HWY_ALIGN T across[kTurned * kDirectKeyBlock];
    const int64_t padded = RoundUp(columns, static_cast<int64_t>(lanes));
    size_t keys = static_cast<size_t>(rows.rows);
    const T* in = wide;
    int64_t stride = padded;
    if constexpr (std::is_same_v<typename Stored::Type, T>) {
      if (columns == padded && keys % lanes == 0) {  // as they lie
        in = KeyRow<Stored>(rows, 0) + first;
        stride = rows.stride;
      }
    }
    if (in == wide) {
      Rows part = rows;
      part.data = KeyRow<Stored>(rows, 0) + first;
      part.depth = columns;
      DirectWiden<T>::WidenRows(tag, part, {wide, padded, rows.rows});
      keys = (keys + lanes - 1) / lanes * lanes;
      std::fill(wide + rows.rows * padded,
                wide + static_cast<int64_t>(keys) * padded, T(0));
    }
    Transpose(in, stride, static_cast<int64_t>(keys), padded, across,
              kDirectKeyBlock);
    const bool add = first > 0;
    ForRowBlocks(x.rows, [&](auto size, int64_t r) HWY_ATTR {
      const auto store = Blocks::StoreIn(products, r, add);
      // With each column some of the next keys, unless they share a line.
      const bool reads =
          r == 0 && rows.stride * sizeof(typename Stored::Type) >= 64;
      const int64_t ahead = reads ? std::min(following, rows.rows) : 0;
      const auto* const next =
          ahead > 0 ? KeyRow<Stored>(rows, rows.rows) + first : nullptr;
      const T* const turned = across;
      const auto load = [=, key = rows.stride](int64_t n, size_t c) HWY_ATTR {
        if (c == 0) {
          for (int64_t k = n; k < ahead; k += columns) {
            for (int64_t i = 0; i < columns; i += 64 / sizeof(*next)) {
              hwy::Prefetch(next + k * key + i);
            }
          }
        }
        return hn::Load(d, turned + n * kDirectKeyBlock + c);
      };
      const SumWeights<T> weights = {Row(x, r) + first, x.stride, 1};
      size_t c = 0;
      for (; c + 4 * lanes <= keys; c += 4 * lanes) {
        Blocks::template SumBlock<size(), 4>(columns, weights, load, c, store);
      }
      for (; c < keys; c += lanes) {
        Blocks::template SumBlock<size(), 1>(columns, weights, load, c, store);
      }
    });
  }

  // Keys of a block, which stays in L1 where row after row of x comes to it.
  static HWY_INLINE int64_t MostKeys(const DirectRows& x) {
    return x.rows <= kDirectBlockRows ? kDirectKeys : kDirectKeyBlock;
  }
  // Calls body(block, its first key, rows that follow it) for blocks of at most
  // `most` rows.
  template <class Stored, class Body>
  static HWY_INLINE void ForKeyBlocks(Stored /*tag*/, int64_t most,
                                      const Rows& rows, int64_t following,
                                      const Body& body) {
    for (int64_t k = 0; k < rows.rows; k += most) {
      Rows block = rows;
      block.rows = std::min(most, rows.rows - k);
      block.data = KeyRow<Stored>(rows, k);
      body(block, k, following + rows.rows - k - block.rows);
    }
  }
  // Columns of rows from key `first` on.
  static HWY_INLINE DirectRows FromKey(const DirectRows& rows, int64_t first) {
    return {Row(rows, 0) + first, rows.stride, rows.rows};
  }

  // kRows rows of x with all keys. Arguments by value, in a function of its
  // own: compilers must assume that storing products changes what references
  // point to, and would read it again for every four keys (one query, 1,024
  // keys, D 64, AVX2: 0.92 of the time in f32, 0.88 in bf16).
  template <int kRows, bool kSplit, class Stored>
  static HWY_NOINLINE void MultiplyKeys(Stored tag, DirectRows x, Rows rows,
                                        LaterRows<Stored> later,
                                        DirectRows products) {
    int64_t k = 0;
    for (; k + 4 <= rows.rows; k += 4) {
      Blocks::template MultiplyBlock<kRows, 4, kSplit>(tag, x, 0, rows, k,
                                                       later, products);
    }
    for (; k < rows.rows; ++k) {
      Blocks::template MultiplyBlock<kRows, 1, kSplit>(tag, x, 0, rows, k,
                                                       later, products);
    }
  }

  // kRows rows of x, put in LoadSplit's order once for all keys.
  static constexpr int64_t kSplitDepth = 256;
  template <int kRows, class Stored>
  static HWY_INLINE void MultiplySplit(Stored tag, const DirectRows& x,
                                       int64_t first, const Rows& rows,
                                       const LaterRows<Stored>& later,
                                       const DirectRows& products) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    HWY_ALIGN T split[kRows * kSplitDepth];
    for (int i = 0; i < kRows; ++i) {
      const T* const row = Row(x, first + i);
      for (size_t c = 0; c < static_cast<size_t>(rows.depth); c += 2 * lanes) {
        V even, odd;
        hn::LoadInterleaved2(d, row + c, even, odd);
        hn::Store(even, d, split + i * kSplitDepth + c);
        hn::Store(odd, d, split + i * kSplitDepth + c + lanes);
      }
    }
    const DirectRows of = {split, kSplitDepth, kRows};
    const DirectRows to = {Row(products, first), products.stride, kRows};
    MultiplyKeys<kRows, true>(tag, of, rows, later, to);
  }

  static void Multiply(const DirectRows& x, const Rows& rows, int64_t following,
                       DirectRows products) {
    WithStored<T>(rows.dtype, [&](auto tag) HWY_ATTR {
      if (IsTurned(x, rows)) {
        return ForKeyBlocks(
            tag, kDirectKeyBlock, rows, following,
            [&](const Rows& block, int64_t first, int64_t after) HWY_ATTR {
              for (int64_t c = 0; c < rows.depth; c += kTurned) {
                MultiplyTurned(tag, x, block, c,
                               std::min(kTurned, rows.depth - c), after,
                               FromKey(products, first));
              }
            });
      }
      using Stored = decltype(tag);
      if constexpr (kSplits<Stored>) {
        if (rows.depth <= kSplitDepth &&
            static_cast<size_t>(rows.depth) % (2 * hn::Lanes(D())) == 0) {
          return ForKeyBlocks(
              tag, MostKeys(x), rows, following,
              [&](const Rows& block, int64_t first, int64_t after) HWY_ATTR {
                const LaterRows<Stored> later(block, block.rows + after);
                ForRowBlocks(x.rows, [&](auto size, int64_t r) HWY_ATTR {
                  MultiplySplit<size()>(tag, x, r, block, later.For(r),
                                        FromKey(products, first));
                });
              });
        }
      }
      const LaterRows<Stored> later(rows, rows.rows + following);
      if (x.rows <= kDirectBlockRows) {  // one block
        return ForRowBlocks(x.rows, [&](auto size, int64_t) HWY_ATTR {
          MultiplyKeys<size(), false>(tag, x, rows, later, products);
        });
      }
      int64_t k = 0;
      for (; k + 4 <= rows.rows; k += 4) {
        ForRowBlocks(x.rows, [&](auto size, int64_t r) HWY_ATTR {
          Blocks::template MultiplyBlock<size(), 4, false>(
              tag, x, r, rows, k, later.For(r), products);
        });
      }
      for (; k < rows.rows; ++k) {
        ForRowBlocks(x.rows, [&](auto size, int64_t r) HWY_ATTR {
          Blocks::template MultiplyBlock<size(), 1, false>(
              tag, x, r, rows, k, later.For(r), products);
        });
      }
    });
  }

  template <class Stored>
  static HWY_INLINE void CombineBlock(Stored tag, const DirectRows& weights,
                                      const Rows& rows, int64_t following,
                                      const DirectRows& out) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t depth = static_cast<size_t>(rows.depth);
    const LaterRows<Stored> ahead(rows, rows.rows + following);
    ForRowBlocksOf(
        depth, lanes, weights.rows, [&](auto size, int64_t r) HWY_ATTR {
          const SumWeights<T> of = {Row(weights, r), weights.stride, 1};
          const LaterRows<Stored> later = ahead.For(r);
          const auto* const first = KeyRow<Stored>(rows, 0);
          const int64_t stride = rows.stride;
          const auto whole = [=](int64_t n, size_t c) HWY_ATTR {
            later.Read(n, c);
            return LoadWide(d, tag, first + n * stride + c);
          };
          [[maybe_unused]] const auto split = [=](int64_t n, size_t c, V& even,
                                                  V& odd) HWY_ATTR {
            if constexpr (kSplits<Stored>) {
              later.Read(n, c);
              Blocks::LoadSplit(first + n * stride + c, even, odd);
            }
          };
          const auto store = Blocks::StoreIn(out, r, /*add=*/true);
          [[maybe_unused]] const auto store_split = [&](int i, size_t c, V even,
                                                        V odd) HWY_ATTR {
            T* const p = Row(out, r + i) + c;
            V even_before, odd_before;
            hn::LoadInterleaved2(d, p, even_before, odd_before);
            hn::StoreInterleaved2(hn::Add(even, even_before),
                                  hn::Add(odd, odd_before), d, p);
          };
          size_t c = 0;
          if constexpr (size() == 1) {
            for (; c + 8 * lanes <= depth; c += 8 * lanes) {
              if constexpr (kSplits<Stored>) {
                Blocks::template SumWideRow<true>(rows.rows, of, split, c,
                                                  store_split);
              } else {
                Blocks::template SumWideRow<false>(rows.rows, of, whole, c,
                                                   store);
              }
            }
          }
          if constexpr (size() <= kDirectBlockRows) {
            for (; c + 4 * lanes <= depth; c += 4 * lanes) {
              if constexpr (kSplits<Stored>) {
                Blocks::template SumBlock<size(), 4, true>(rows.rows, of, split,
                                                           c, store_split);
              } else {
                Blocks::template SumBlock<size(), 4>(rows.rows, of, whole, c,
                                                     store);
              }
            }
          }
          if (c + 2 * lanes <= depth) {
            Blocks::template SumBlock<size(), 2>(rows.rows, of, whole, c,
                                                 store);
            c += 2 * lanes;
          }
          if (c + lanes <= depth) {
            Blocks::template SumBlock<size(), 1>(rows.rows, of, whole, c,
                                                 store);
            c += lanes;
          }
          if (c < depth) {
            const auto tail = [=](int64_t n, size_t from) HWY_ATTR {
              return LoadWideTail(d, tag, first + n * stride + from,
                                  depth - from);
            };
            Blocks::template SumBlock<size(), 1>(rows.rows, of, tail, c, store);
          }
        });
  }

  static void Combine(const DirectRows& weights, const Rows& rows,
                      int64_t following, DirectRows out) {
    WithStored<T>(rows.dtype, [&](auto tag) HWY_ATTR {
      ForKeyBlocks(
          tag, MostKeys(weights), rows, following,
          [&](const Rows& block, int64_t first, int64_t after) HWY_ATTR {
            CombineBlock(tag, FromKey(weights, first), block, after, out);
          });
    });
  }

  static void Spread(const DirectRows& weights, int64_t keys,
                     const DirectRows& x, int64_t columns, double factor,
                     DirectRows out) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t depth = static_cast<size_t>(columns);
    const T scale = static_cast<T>(factor);
    const auto load =
        [d, rows = Row(x, 0), stride = x.stride](int64_t n, size_t c)
            HWY_ATTR { return hn::Load(d, rows + n * stride + c); };
    ForRowBlocksOf(depth, lanes, keys, [&](auto size, int64_t k) HWY_ATTR {
      const SumWeights<T> of = {Row(weights, 0) + k, 1, weights.stride};
      // By value: what is stored might else have changed them.
      T* const first = Row(out, k);
      const auto store = [first, stride = out.stride, scale](int i, size_t c,
                                                             V sum) HWY_ATTR {
        hn::StoreU(hn::Mul(sum, hn::Set(D(), scale)), D(),
                   first + i * stride + c);
      };
      size_t c = 0;
      if constexpr (size() <= kDirectBlockRows) {
        for (; c + 4 * lanes <= depth; c += 4 * lanes) {
          Blocks::template SumBlock<size(), 4>(x.rows, of, load, c, store);
        }
      }
      if (c + 2 * lanes <= depth) {
        Blocks::template SumBlock<size(), 2>(x.rows, of, load, c, store);
        c += 2 * lanes;
      }
      if (c + lanes <= depth) {
        Blocks::template SumBlock<size(), 1>(x.rows, of, load, c, store);
        c += lanes;
      }
      if (c < depth) {
        const auto store_tail = [&](int i, size_t from, V sum) HWY_ATTR {
          StoreNarrowTail(d, Own(), hn::Mul(sum, hn::Set(d, scale)),
                          Row(out, k + i) + from, depth - from);
        };
        Blocks::template SumBlock<size(), 1>(x.rows, of, load, c, store_tail);
      }
    });
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
