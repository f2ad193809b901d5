// SPDX-License-Identifier: Apache-2.0

// Packing of operands into tiles for the AMX engines. Layouts: amx/layout.h.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_PACK_INL_H_
#define FA2_SRC_SIMD_AMX_PACK_INL_H_

#include "src/simd/amx/layout.h"
#include "src/simd/amx/tile-inl.h"
#include "src/simd/amx/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// The upper 16 bits of x, which is left with the rest. What is left of an
// infinite x is NaN.
struct UpperBits {
  static HWY_INLINE Floats TakeFrom(Floats& x) {
    const FloatTag d;
    const WordTag words;
    const Floats taken = hn::BitCast(
        d, hn::And(hn::BitCast(words, x), hn::Set(words, 0xffff0000u)));
    x = hn::Sub(x, taken);
    return taken;
  }
};

// x to bf16, half up, which leaves half as much as cutting it off, of both
// signs. Nothing is left of a non-finite number, so that it keeps its own
// value.
struct NearestBf16 {
  static HWY_INLINE Floats TakeFrom(Floats& x) {
    const FloatTag d;
    const WordTag words;
    const FloatMask finite = hn::IsFinite(x);
    const Words half_up =
        hn::Add(hn::BitCast(words, x), hn::Set(words, 0x8000u));
    const Floats rounded =
        hn::BitCast(d, hn::And(half_up, hn::Set(words, 0xffff0000u)));
    const Floats taken = hn::IfThenElse(finite, rounded, x);
    x = hn::IfThenElseZero(finite, hn::Sub(x, taken));
    return taken;
  }
};

// 32 numbers as a sum of kTerms bf16 vectors, most significant first. First:
// how all terms but the last are taken: of inputs NearestBf16; of P and dS
// UpperBits, in the fewest operations, since the fused passes wait for them.
template <class Tiles, int kTerms, class First>
HWY_INLINE void SplitTerms(Floats low, Floats high, Bf16s* HWY_RESTRICT terms) {
  for (int t = 0; t + 1 < kTerms; ++t) {
    const Floats low_term = First::TakeFrom(low);
    const Floats high_term = First::TakeFrom(high);
    terms[t] = Tiles::RoundToBf16(low_term, high_term);
  }
  terms[kTerms - 1] = Tiles::RoundToBf16(low, high);
}

// 32 columns from `column` on, those that there are, as bits.
HWY_INLINE uint32_t ColumnBits(int64_t depth, int64_t column) {
  const int64_t left = depth - column;
  return left >= 32 ? ~uint32_t{0} : (uint32_t{1} << left) - 1;
}

// Reads up to 32 elements of a row as bf16 terms; the rest are 0. Elements
// that are NaN or infinite set bits of `non_finite` and, with kFiniteOnly,
// become 0.
template <class Tiles, int kTerms, bool kFiniteOnly>
struct RowReader {
  static HWY_INLINE void Read(const uint16_t* row, DType dtype,
                              uint32_t columns, Bf16s* HWY_RESTRICT terms,
                              uint32_t& non_finite) {
    const FloatTag d;
    const Bf16Tag d16;
    const hn::FixedTag<uint16_t, 16> half;
    const hn::FixedTag<hwy::float16_t, 16> f16;
    const Bf16s x = hn::MaskedLoad(Bf16MaskOf(columns), d16, row);
    // All exponent bits set.
    const Bf16s exponent = hn::Set(
        d16, static_cast<uint16_t>(dtype == DType::kBF16 ? 0x7f80 : 0x7c00));
    const Bf16Mask bad = hn::Eq(hn::And(x, exponent), exponent);
    non_finite |= BitsOf(bad);
    const Bf16s kept = kFiniteOnly ? hn::IfThenZeroElse(bad, x) : x;
    if (dtype == DType::kBF16) {
      terms[0] = kept;
      for (int t = 1; t < kTerms; ++t) terms[t] = hn::Zero(d16);
    } else {
      SplitTerms<Tiles, kTerms, NearestBf16>(
          hn::PromoteTo(d, hn::BitCast(f16, hn::LowerHalf(half, kept))),
          hn::PromoteTo(d, hn::BitCast(f16, hn::UpperHalf(half, kept))), terms);
    }
  }
  static HWY_INLINE void Read(const float* row, DType, uint32_t columns,
                              Bf16s* HWY_RESTRICT terms, uint32_t& non_finite) {
    const FloatTag d;
    const WordTag words;
    const Words exponent = hn::Set(words, 0x7f800000u);
    Floats half[2];
    for (int h = 0; h < 2; ++h) {
      const FloatMask there =
          FloatMaskOf(static_cast<uint16_t>(columns >> 16 * h));
      const Floats x = hn::MaskedLoad(there, d, row + 16 * h);
      const FloatMask bad = hn::RebindMask(
          d, hn::Eq(hn::And(hn::BitCast(words, x), exponent), exponent));
      non_finite |= BitsOf(bad);
      half[h] = kFiniteOnly ? hn::IfThenZeroElse(bad, x) : x;
    }
    SplitTerms<Tiles, kTerms, NearestBf16>(half[0], half[1], terms);
  }
};

// Interleaves the elements of two rows: pairs of columns 0-3, 8-11, 16-19 and
// 24-27, and the others.
HWY_INLINE void InterleaveLanes(Bf16s even, Bf16s odd, Bf16s& low,
                                Bf16s& high) {
  low = hn::InterleaveLower(Bf16Tag(), even, odd);
  high = hn::InterleaveUpper(Bf16Tag(), even, odd);
}

// The same: pairs of columns 0-15 and 16-31.
HWY_INLINE void InterleaveRows(Bf16s even, Bf16s odd, Bf16s& low, Bf16s& high) {
  Bf16s a, b;
  InterleaveLanes(even, odd, a, b);
  low = InterleaveLowerBlocks(a, b);
  high = InterleaveUpperBlocks(a, b);
}

// Where a panel of 32 rows x 32 columns is written.
struct PackPlace {
  int64_t panel;   // of rows
  int64_t panels;  // of the block
  int64_t k;       // 32 columns
  int64_t depth_tiles;
  int64_t chunk_panels;  // kGradLeft, see ChunkPanels
};

// One term of a panel, its rows `stride` bytes apart, in the layout of a role.
template <int kTerms>
HWY_INLINE void WritePanel(Role role, const PackPlace& at, int term,
                           const uint8_t* rows, int64_t stride,
                           uint8_t* HWY_RESTRICT packed) {
  // 32 bf16 of a row, or 16 words.
  const auto load = [rows, stride](int row) HWY_ATTR {
    return hn::LoadU(Bf16Tag(),
                     reinterpret_cast<const uint16_t*>(rows + row * stride));
  };
  switch (role) {
    case Role::kScoreLeft:
    case Role::kScoreRight:
      for (int half = 0; half < 2; ++half) {
        uint8_t* const tile =
            packed +
            (((at.panel * kTerms + term) * 2 + half) * at.depth_tiles + at.k) *
                kTileBytes;
        if (role == Role::kScoreRight) {
          Floats v[16];
          LoadColumns(rows + 16 * half * stride, stride, v);
          for (int i = 0; i < 16; ++i) StoreRow(v[i], tile + 64 * i);
        } else {
          for (int i = 0; i < 16; ++i) {
            StoreRow(load(16 * half + i), tile + 64 * i);
          }
        }
      }
      return;
    case Role::kGradRight: {
      uint8_t* const tile =
          packed + ((term * at.depth_tiles + at.k) * 2 * at.panels + at.panel) *
                       kTileBytes;
      for (int i = 0; i < 16; ++i) {
        Bf16s low, high;
        InterleaveRows(load(2 * i), load(2 * i + 1), low, high);
        StoreRow(low, tile + 64 * i);
        StoreRow(high, tile + at.panels * kTileBytes + 64 * i);
      }
      return;
    }
    case Role::kGradLeft: {
      const int64_t chunk = at.panel / at.chunk_panels * at.chunk_panels;
      const int64_t in_chunk = std::min(at.chunk_panels, at.panels - chunk);
      uint8_t* const tile =
          packed +
          (chunk * at.depth_tiles * 2 * kTerms +
           (term * at.depth_tiles + at.k) * 2 * in_chunk + at.panel - chunk) *
              kTileBytes;
      alignas(64) uint8_t pairs[2][16 * 64];
      for (int i = 0; i < 16; ++i) {
        Bf16s low, high;
        InterleaveLanes(load(2 * i), load(2 * i + 1), low, high);
        StoreRow(low, pairs[0] + 64 * i);
        StoreRow(high, pairs[1] + 64 * i);
      }
      for (int odd = 0; odd < 2; ++odd) {
        Floats v[16];
        LoadColumns(pairs[odd], 64, v);
        for (int i = 0; i < 16; ++i) {
          const int column = i / 4 * 8 + odd * 4 + i % 4;
          StoreRow(v[i], tile + column / 16 * in_chunk * kTileBytes +
                             column % 16 * 64);
        }
      }
      return;
    }
  }
}

// Prefetches the first line of 32 rows, `stride` bytes apart.
HWY_INLINE void FetchRows(const uint8_t* rows, int64_t stride) {
  for (int64_t r = 0; r < 32; ++r) hwy::Prefetch(rows + r * stride);
}

// A role and where its packing goes.
struct PackTarget {
  Role role;
  uint8_t* packed;
};

template <class Tiles, int kTerms, bool kFiniteOnly, int kTargets, class T>
bool PackRows(const PackTarget (&targets)[kTargets], const Rows& rows,
              int64_t padded_rows) {
  const T* data = static_cast<const T*>(rows.data);
  PackPlace at;
  at.panels = amx::Panels(padded_rows);
  at.depth_tiles = amx::DepthTiles(rows.depth);
  at.chunk_panels = amx::ChunkPanels(rows.depth);
  const bool plain = sizeof(T) == 2 && kTerms == 1 && !kFiniteOnly &&
                     rows.dtype == DType::kBF16;
  const Bf16Tag d16;
  uint32_t non_finite = 0;
  Bf16s largest = hn::Zero(d16);  // of bf16 magnitudes
  for (at.panel = 0; at.panel < at.panels; ++at.panel) {
    const int64_t first = 32 * at.panel;
    for (at.k = 0; at.k < at.depth_tiles; ++at.k) {
      const T* const corner = data + first * rows.stride + 32 * at.k;
      if (plain && rows.depth - 32 * at.k >= 32 && rows.rows - first >= 32) {
        const uint8_t* const panel = reinterpret_cast<const uint8_t*>(corner);
        const int64_t stride = 2 * rows.stride;
        // The next panel, which packing would wait for (N 1024: backward D 64
        // and forward D 128 1 to 2%, backward D 128 and 256 0).
        if (rows.rows - first >= 64) FetchRows(panel + 32 * stride, stride);
        for (int64_t r = 0; r < 32; ++r) {
          const Bf16s x = hn::LoadU(
              d16, reinterpret_cast<const uint16_t*>(panel + r * stride));
          largest = hn::Max(largest, hn::And(x, hn::Set(d16, 0x7fff)));
        }
        for (const PackTarget& target : targets) {
          WritePanel<kTerms>(target.role, at, 0, panel, stride, target.packed);
        }
        continue;
      }
      alignas(64) uint8_t x[kTerms][32 * 64];
      const uint32_t columns = ColumnBits(rows.depth, 32 * at.k);
      for (int64_t r = 0; r < 32; ++r) {
        Bf16s terms[kTerms];
        if (first + r < rows.rows) {
          RowReader<Tiles, kTerms, kFiniteOnly>::Read(
              corner + r * rows.stride, rows.dtype, columns, terms, non_finite);
        } else {
          for (int t = 0; t < kTerms; ++t) terms[t] = hn::Zero(d16);
        }
        for (int t = 0; t < kTerms; ++t) StoreRow(terms[t], x[t] + 64 * r);
      }
      for (int t = 0; t < kTerms; ++t) {
        for (const PackTarget& target : targets) {
          WritePanel<kTerms>(target.role, at, t, x[t], 64, target.packed);
        }
      }
    }
  }
  // All exponent bits set.
  non_finite |= BitsOf(hn::Gt(largest, hn::Set(d16, 0x7f7f)));
  return non_finite == 0;
}

template <class Tiles, int kTerms>
bool Pack(Role role, const Rows& rows, int64_t padded_rows, bool finite_only,
          void* packed) {
  const PackTarget targets[] = {{role, static_cast<uint8_t*>(packed)}};
  if (rows.dtype == DType::kF32) {
    return finite_only ? PackRows<Tiles, kTerms, true, 1, float>(targets, rows,
                                                                 padded_rows)
                       : PackRows<Tiles, kTerms, false, 1, float>(targets, rows,
                                                                  padded_rows);
  }
  return finite_only ? PackRows<Tiles, kTerms, true, 1, uint16_t>(targets, rows,
                                                                  padded_rows)
                     : PackRows<Tiles, kTerms, false, 1, uint16_t>(
                           targets, rows, padded_rows);
}

template <class Tiles, int kTerms>
bool PackPair(Role score, Role grad, const Rows& rows, int64_t padded_rows,
              void* packed_score, void* packed_grad) {
  const PackTarget targets[] = {{score, static_cast<uint8_t*>(packed_score)},
                                {grad, static_cast<uint8_t*>(packed_grad)}};
  return rows.dtype == DType::kF32
             ? PackRows<Tiles, kTerms, false, 2, float>(targets, rows,
                                                        padded_rows)
             : PackRows<Tiles, kTerms, false, 2, uint16_t>(targets, rows,
                                                           padded_rows);
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_PACK_INL_H_
