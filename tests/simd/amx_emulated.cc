// SPDX-License-Identifier: Apache-2.0
#include "tests/simd/amx_emulated.h"

#include "src/simd/amx/target.h"

#if FA2_AMX_TARGET != 0
#include "src/simd/amx/select_target.h"
// After select_target.h.
#include <cmath>
#include <cstring>
#include <random>

#include "src/simd/amx/engine-inl.h"
#include "src/simd/target.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

template <class Tiles>
void OneTileProduct(const void* a, const void* b, void* c) {
  Tiles::Begin();
  Tiles::template Load<0>(c, 64);
  Tiles::template Load<1>(a, 64);
  Tiles::template LoadStreaming<2>(b, 64);
  Tiles::template Dot<0, 1, 2>();
  Tiles::template Store<0>(c);
  Tiles::End();
}

double CompareTileProducts(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  alignas(64) uint16_t a[512], b[512];
  alignas(64) float c[2][256];
  const auto bf16 = [&] {
    const float x = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(bits >> 16);
  };
  for (int i = 0; i < 512; ++i) {
    a[i] = bf16();
    b[i] = bf16();
  }
  for (int i = 0; i < 256; ++i) c[0][i] = c[1][i] = normal(random);
  OneTileProduct<HardwareTiles>(a, b, c[0]);
  OneTileProduct<EmulatedTiles>(a, b, c[1]);
  double largest = 0.0;
  for (int i = 0; i < 256; ++i) {
    const double ulp = std::ldexp(1.0, std::ilogb(c[1][i]) - 23);
    largest = std::max(largest,
                       std::abs(static_cast<double>(c[0][i]) - c[1][i]) / ulp);
  }
  return largest;
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

namespace fa2::simd {

#if defined(FA2_NO_EMULATED_INSTANCES)
const Engine* EmulatedAmxEngine(AmxTerms) { return nullptr; }
#else
const Engine* EmulatedAmxEngine(AmxTerms terms) {
  if ((AvailableTargets() & FA2_AMX_TARGET) == 0) return nullptr;
  return HWY_NAMESPACE::AmxEngineFor<HWY_NAMESPACE::EmulatedTiles>(terms);
}
#endif

double TileProductDifference(uint32_t seed) {
  return HWY_NAMESPACE::CompareTileProducts(seed);
}

}  // namespace fa2::simd

#else

namespace fa2::simd {

const Engine* EmulatedAmxEngine(AmxTerms) { return nullptr; }
double TileProductDifference(uint32_t) { return 0.0; }

}  // namespace fa2::simd

#endif
