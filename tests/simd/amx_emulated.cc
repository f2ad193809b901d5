#include "tests/simd/amx_emulated.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/simd/amx_emulated.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/highway.h"
#include "src/simd/amx/target.h"
// For every target, so that their guards take turns.
#include "src/simd/math/exp-inl.h"
#include "src/simd/math/philox-inl.h"
#include "src/simd/math/transpose-inl.h"
#include "src/simd/target.h"

#if FA2_AMX_TARGET != 0 && HWY_TARGET == FA2_AMX_TARGET
#include "src/simd/amx/instances-inl.h"
#endif

#include <cmath>
#include <cstring>
#include <random>

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

#if FA2_AMX_TARGET != 0 && HWY_TARGET == FA2_AMX_TARGET

const Engine* EmulatedEngine(AmxTerms terms) {
  return AmxEngineFor<EmulatedTiles>(terms);
}

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

#else

const Engine* EmulatedEngine(AmxTerms) { return nullptr; }
double CompareTileProducts(uint32_t) { return 0.0; }

#endif

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fa2::simd {

HWY_EXPORT(EmulatedEngine);
HWY_EXPORT(CompareTileProducts);

const Engine* EmulatedAmxEngine(AmxTerms terms) {
  if ((AvailableTargets() & FA2_AMX_TARGET) == 0) return nullptr;
  return FA2_TARGET_FUNCTION(EmulatedEngine, FA2_AMX_TARGET)(terms);
}

double TileProductDifference(uint32_t seed) {
  return FA2_TARGET_FUNCTION(CompareTileProducts, FA2_AMX_TARGET)(seed);
}

}  // namespace fa2::simd
#endif  // HWY_ONCE
