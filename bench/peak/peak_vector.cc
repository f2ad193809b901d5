// SPDX-License-Identifier: Apache-2.0

// Multiply-add and memory loops for every Highway target.
#include <cstdint>
#include <string>

#include "bench/peak/peak_kernels.h"
#include "hwy/cache_control.h"
#include "hwy/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/peak/peak_vector.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::peak {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// acc = acc * a + b with |a| < 1 stays bounded and never becomes denormal, and
// every accumulator is a chain of its own.
template <typename T, bool kMany>
double FmaRounds(size_t rounds, const float* seed, float* sink) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr size_t kUnroll = 8;
  const V a = hn::Set(d, static_cast<T>(0.5 + 0.4 * seed[0]));
  const V b = hn::Set(d, static_cast<T>(seed[1] + 2));
  const auto start = [&](int i) HWY_ATTR {
    return hn::Add(hn::Iota(d, static_cast<T>(i)),
                   hn::Set(d, static_cast<T>(seed[i])));
  };
  V a00 = start(0), a01 = start(1), a02 = start(2), a03 = start(3),
    a04 = start(4), a05 = start(5), a06 = start(6), a07 = start(7),
    a08 = start(8), a09 = start(9), a10 = start(10), a11 = start(11);
  V b00 = start(12), b01 = start(13), b02 = start(14), b03 = start(15),
    b04 = start(16), b05 = start(17), b06 = start(18), b07 = start(19),
    b08 = start(20), b09 = start(21), b10 = start(22), b11 = start(23);
  for (size_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < kUnroll; ++i) {
      a00 = hn::MulAdd(a00, a, b);
      a01 = hn::MulAdd(a01, a, b);
      a02 = hn::MulAdd(a02, a, b);
      a03 = hn::MulAdd(a03, a, b);
      a04 = hn::MulAdd(a04, a, b);
      a05 = hn::MulAdd(a05, a, b);
      a06 = hn::MulAdd(a06, a, b);
      a07 = hn::MulAdd(a07, a, b);
      a08 = hn::MulAdd(a08, a, b);
      a09 = hn::MulAdd(a09, a, b);
      a10 = hn::MulAdd(a10, a, b);
      a11 = hn::MulAdd(a11, a, b);
      if constexpr (kMany) {
        b00 = hn::MulAdd(b00, a, b);
        b01 = hn::MulAdd(b01, a, b);
        b02 = hn::MulAdd(b02, a, b);
        b03 = hn::MulAdd(b03, a, b);
        b04 = hn::MulAdd(b04, a, b);
        b05 = hn::MulAdd(b05, a, b);
        b06 = hn::MulAdd(b06, a, b);
        b07 = hn::MulAdd(b07, a, b);
        b08 = hn::MulAdd(b08, a, b);
        b09 = hn::MulAdd(b09, a, b);
        b10 = hn::MulAdd(b10, a, b);
        b11 = hn::MulAdd(b11, a, b);
      }
    }
  }
  const V low = hn::Add(hn::Add(hn::Add(a00, a01), hn::Add(a02, a03)),
                        hn::Add(hn::Add(a04, a05), hn::Add(a06, a07)));
  const V mid = hn::Add(hn::Add(a08, a09), hn::Add(a10, a11));
  const V high = hn::Add(hn::Add(hn::Add(b00, b01), hn::Add(b02, b03)),
                         hn::Add(hn::Add(b04, b05), hn::Add(b06, b07)));
  const V top = hn::Add(hn::Add(b08, b09), hn::Add(b10, b11));
  const V sum = hn::Add(hn::Add(low, mid), hn::Add(high, top));
  *sink = static_cast<float>(hn::GetLane(sum));
  return 2.0 * (kMany ? 24 : 12) * kUnroll * static_cast<double>(rounds) *
         static_cast<double>(hn::Lanes(d));
}

double F32Fma12(size_t rounds, const float* seed, float* sink) {
  return FmaRounds<float, false>(rounds, seed, sink);
}
double F32Fma24(size_t rounds, const float* seed, float* sink) {
  return FmaRounds<float, true>(rounds, seed, sink);
}

#if HWY_HAVE_FLOAT64
double F64Fma12(size_t rounds, const float* seed, float* sink) {
  return FmaRounds<double, false>(rounds, seed, sink);
}
double F64Fma24(size_t rounds, const float* seed, float* sink) {
  return FmaRounds<double, true>(rounds, seed, sink);
}
#endif

void Stream(float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
            const float* HWY_RESTRICT c, size_t count, bool stream) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto s = hn::Set(d, 0.5f);
  if (c == nullptr && stream) {
    for (size_t i = 0; i < count; i += lanes) {
      hn::Stream(hn::Load(d, b + i), d, a + i);
    }
  } else if (c == nullptr) {
    for (size_t i = 0; i < count; i += lanes) {
      hn::Store(hn::Load(d, b + i), d, a + i);
    }
  } else if (stream) {
    for (size_t i = 0; i < count; i += lanes) {
      hn::Stream(hn::MulAdd(hn::Load(d, c + i), s, hn::Load(d, b + i)), d,
                 a + i);
    }
  } else {
    for (size_t i = 0; i < count; i += lanes) {
      hn::Store(hn::MulAdd(hn::Load(d, c + i), s, hn::Load(d, b + i)), d,
                a + i);
    }
  }
  hwy::FlushStream();
}

VectorKernels Kernels() {
#if HWY_HAVE_FLOAT64
  return {{F32Fma12, F32Fma24}, {F64Fma12, F64Fma24}, Stream};
#else
  return {{F32Fma12, F32Fma24}, {nullptr, nullptr}, Stream};
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::peak
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/simd/target.h"

namespace fa2::peak {

HWY_EXPORT(Kernels);

VectorKernels VectorKernelsOf(const std::string& target) {
  int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  for (int64_t rest = targets; rest != 0; rest &= rest - 1) {
    std::string name = hwy::TargetName(rest & -rest);
    for (char& c : name) {
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    if (name == target) {
      targets = rest;
      break;
    }
  }
  return FA2_TARGET_FUNCTION(Kernels, targets)();
}

}  // namespace fa2::peak
#endif  // HWY_ONCE
