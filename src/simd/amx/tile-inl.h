// SPDX-License-Identifier: Apache-2.0

// Tile registers of AMX as a class of static functions, on the hardware and in
// software. Engines are templates over that class, so that the same kernels
// run (slowly) in tests on machines without AMX.
//
// Eight registers of 16 rows x 64 bytes. A left operand ("A") holds 16 rows of
// 32 bf16; a right operand ("B") holds 16 rows of 16 pairs of bf16, a row
// being two consecutive summation indices; a result ("C") holds 16 x 16 f32.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_TILE_INL_H_
#define FA2_SRC_SIMD_AMX_TILE_INL_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

inline constexpr int64_t kTileBytes = 1024;

// The instructions are inline assembly: no compiler flag enables them for one
// function of a file that must also run elsewhere, and GCC 12's
// _tile_loadconfig tells the compiler that it reads 8 bytes, so that the
// stores of the other 56 are dropped. Loads do not clobber memory, so that the
// compiler may move the fused pass's stores past them; Fence() stands between
// phases that hand data over in memory.
struct HardwareTiles {
  static HWY_INLINE void Begin() {
    struct alignas(64) Config {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t column_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; ++t) {
      config.column_bytes[t] = 64;
      config.rows[t] = 16;
    }
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  // Returns the tile state to its initial value: the 8 KiB need not be saved
  // on a context switch, and other code finds no configuration of ours.
  static HWY_INLINE void End() { asm volatile("tilerelease" : : : "memory"); }
  static HWY_INLINE void Fence() { asm volatile("" : : : "memory"); }

  template <int kTile>
  static HWY_INLINE void Load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(p), "r"(stride), "i"(kTile));
  }
  // For operands that are used once: does not displace L1's contents.
  template <int kTile>
  static HWY_INLINE void LoadStreaming(const void* p, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(p), "r"(stride), "i"(kTile));
  }
  template <int kTile>
  static HWY_INLINE void Store(void* p) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                 :
                 : "r"(p), "r"(int64_t{64}), "i"(kTile)
                 : "memory");
  }
  template <int kTile>
  static HWY_INLINE void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  // C += A B.
  template <int kC, int kA, int kB>
  static HWY_INLINE void Dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 :
                 : "i"(kC), "i"(kA), "i"(kB));
  }
  // 32 floats to 32 bf16, to nearest even.
  static HWY_INLINE __m512i RoundToBf16(__m512 low, __m512 high) {
    __m512i result;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(result) : "v"(low), "v"(high));
    return result;
  }
};

// The same in software, for tests. Sums are taken in the order that Intel's
// manual gives for TDPBF16PS: even and odd elements of the pairs in two fused
// chains, their sum added to C.
struct EmulatedTiles {
  struct Registers {
    alignas(64) uint8_t bytes[8][kTileBytes];
  };
  static Registers& State() {
    static thread_local Registers registers;
    return registers;
  }
  static void Begin() { std::memset(&State(), 0, sizeof(Registers)); }
  static void End() {}
  static void Fence() {}

  template <int kTile>
  static HWY_NOINLINE void Load(const void* p, int64_t stride) {
    uint8_t* tile = State().bytes[kTile];
    for (int row = 0; row < 16; ++row) {
      std::memcpy(tile + 64 * row,
                  static_cast<const uint8_t*>(p) + row * stride, 64);
    }
  }
  template <int kTile>
  static HWY_NOINLINE void LoadStreaming(const void* p, int64_t stride) {
    Load<kTile>(p, stride);
  }
  template <int kTile>
  static HWY_NOINLINE void Store(void* p) {
    std::memcpy(p, State().bytes[kTile], kTileBytes);
  }
  template <int kTile>
  static HWY_NOINLINE void Zero() {
    std::memset(State().bytes[kTile], 0, kTileBytes);
  }
  template <int kC, int kA, int kB>
  static HWY_NOINLINE void Dot() {
    Registers& r = State();
    for (int row = 0; row < 16; ++row) {
      const uint8_t* a = r.bytes[kA] + 64 * row;
      __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      for (int k = 0; k < 16; ++k) {
        uint32_t pair;
        std::memcpy(&pair, a + 4 * k, 4);
        const __m512i b = _mm512_load_si512(r.bytes[kB] + 64 * k);
        const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        const __m512i left = _mm512_set1_epi32(static_cast<int>(pair));
        even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                               _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)),
                               even);
        odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(left, high)),
                              _mm512_castsi512_ps(_mm512_and_si512(b, high)),
                              odd);
      }
      float* c = reinterpret_cast<float*>(r.bytes[kC] + 64 * row);
      _mm512_store_ps(
          c, _mm512_add_ps(_mm512_load_ps(c), _mm512_add_ps(even, odd)));
    }
  }
  static HWY_NOINLINE __m512i RoundToBf16(__m512 low, __m512 high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(Round16(low)),
                              Round16(high), 1);
  }

 private:
  static __m256i Round16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i lsb =
        _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(
        bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded =
        _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_TILE_INL_H_
