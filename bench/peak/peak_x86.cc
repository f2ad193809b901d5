// SPDX-License-Identifier: Apache-2.0

// The x86 matrix units that Highway 1.0.3 does not offer, under function
// attributes so that the file needs no compiler flags.
#include "bench/peak/peak_kernels.h"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "src/platform/amx_permission.h"
#include "src/platform/tile_config.h"

namespace fa2::peak {
namespace {

// bf16 by truncation: the data only has to be random.
void Truncate(const float* from, size_t count, uint16_t* to) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    to[i] = static_cast<uint16_t>(bits >> 16);
  }
}

// 24 accumulators of 16 lanes, two operands: 26 of 32 registers.
__attribute__((target("avx512f,avx512bf16"))) double Bf16DotRounds(
    size_t rounds, const float* seed, float* sink) {
  uint16_t bf16[64];
  Truncate(seed, 64, bf16);
  __m512bh a, b;
  std::memcpy(&a, bf16, sizeof a);
  std::memcpy(&b, bf16 + 32, sizeof b);
  // A local array with constant bounds, fully unrolled, stays in registers.
  __m512 acc[24];
#pragma GCC unroll 24
  for (int i = 0; i < 24; ++i) acc[i] = _mm512_set1_ps(seed[i]);
  for (size_t round = 0; round < rounds; ++round) {
    for (int unroll = 0; unroll < 8; ++unroll) {
#pragma GCC unroll 24
      for (int i = 0; i < 24; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], a, b);
    }
  }
  __m512 sum = acc[0];
#pragma GCC unroll 24
  for (int i = 1; i < 24; ++i) sum = _mm512_add_ps(sum, acc[i]);
  *sink = _mm512_cvtss_f32(sum);
  return 24.0 * 8 * static_cast<double>(rounds) * 32 * 2;
}

// 2 x 2 accumulator tiles, two left and two right operands: all 8 tiles, as a
// matrix kernel uses them. 4 x 16 cycles between uses of an accumulator hide
// the latency of 52.
__attribute__((target("amx-tile,amx-bf16"))) double AmxRounds(size_t rounds,
                                                              const float* seed,
                                                              float* sink) {
  platform::TileConfig config;
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  // GCC 12's _tile_loadconfig claims to read 8 bytes, so the stores above would
  // be dropped.
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  // Tiles of 16 rows x 32 values, every row the seed rotated.
  alignas(64) static thread_local uint16_t tiles[4][16 * 32];
  uint16_t bf16[64];
  Truncate(seed, 64, bf16);
  for (int tile = 0; tile < 4; ++tile) {
    for (int i = 0; i < 16 * 32; ++i) {
      tiles[tile][i] = bf16[(i * 7 + i / 32 + tile * 13) % 64];
    }
  }
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, tiles[0], 64);
  _tile_loadd(5, tiles[1], 64);
  _tile_loadd(6, tiles[2], 64);
  _tile_loadd(7, tiles[3], 64);
  for (size_t round = 0; round < rounds; ++round) {
    for (int unroll = 0; unroll < 8; ++unroll) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) static thread_local float result[16 * 16];
  float sum = 0;
  _tile_stored(0, result, 64);
  sum += result[0];
  _tile_stored(1, result, 64);
  sum += result[0];
  _tile_stored(2, result, 64);
  sum += result[0];
  _tile_stored(3, result, 64);
  sum += result[0];
  _tile_release();
  *sink = sum;
  return 4.0 * 8 * static_cast<double>(rounds) * 16 * 16 * 32 * 2;
}

}  // namespace

FlopKernel Bf16DotKernel() {
  return __builtin_cpu_supports("avx512bf16") ? Bf16DotRounds : nullptr;
}

FlopKernel AmxBf16Kernel() {
  return platform::MayUseAmxBf16() ? AmxRounds : nullptr;
}

}  // namespace fa2::peak

#else

namespace fa2::peak {

FlopKernel Bf16DotKernel() { return nullptr; }
FlopKernel AmxBf16Kernel() { return nullptr; }

}  // namespace fa2::peak

#endif
