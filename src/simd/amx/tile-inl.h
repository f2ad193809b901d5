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

#include <cstdint>
#include <cstring>

#include "src/platform/tile_config.h"
#include "src/simd/amx/vector-inl.h"

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
    platform::TileConfig config;
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.row_bytes[t] = 64;
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
  static HWY_INLINE Bf16s RoundToBf16(Floats low, Floats high) {
    Bf16s result;
    asm("vcvtne2ps2bf16 %1, %2, %0"
        : "=v"(result.raw)
        : "v"(low.raw), "v"(high.raw));
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
    const FloatTag d;
    const WordTag words;
    Registers& r = State();
    for (int row = 0; row < 16; ++row) {
      const uint8_t* a = r.bytes[kA] + 64 * row;
      Floats even = hn::Zero(d), odd = hn::Zero(d);
      for (int k = 0; k < 16; ++k) {
        uint32_t pair;
        std::memcpy(&pair, a + 4 * k, 4);
        const Words left = hn::Set(words, pair);
        const Words right = hn::BitCast(words, LoadRow(r.bytes[kB] + 64 * k));
        const Words high = hn::Set(words, 0xffff0000u);
        even = hn::MulAdd(hn::BitCast(d, hn::ShiftLeft<16>(left)),
                          hn::BitCast(d, hn::ShiftLeft<16>(right)), even);
        odd = hn::MulAdd(hn::BitCast(d, hn::And(left, high)),
                         hn::BitCast(d, hn::And(right, high)), odd);
      }
      uint8_t* const c = r.bytes[kC] + 64 * row;
      StoreRow(hn::Add(LoadRow(c), hn::Add(even, odd)), c);
    }
  }
  static HWY_NOINLINE Bf16s RoundToBf16(Floats low, Floats high) {
    return hn::Combine(Bf16Tag(), Round16(high), Round16(low));
  }

 private:
  static HWY_INLINE hn::Vec<hn::FixedTag<uint16_t, 16>> Round16(Floats x) {
    const WordTag words;
    const Words bits = hn::BitCast(words, x);
    const Words lsb = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1u));
    const Words rounded = hn::Add(bits, hn::Add(lsb, hn::Set(words, 0x7fffu)));
    const Words quiet_nan = hn::Or(bits, hn::Set(words, 0x400000u));
    return hn::TruncateTo(
        hn::FixedTag<uint16_t, 16>(),
        hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(words, hn::IsNaN(x)),
                                          quiet_nan, rounded)));
  }
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_TILE_INL_H_
