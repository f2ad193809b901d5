// SPDX-License-Identifier: Apache-2.0

// The inner loops that peak.cc times.
#ifndef FA2_BENCH_PEAK_PEAK_KERNELS_H_
#define FA2_BENCH_PEAK_PEAK_KERNELS_H_

#include <cstddef>
#include <string>

namespace fa2::peak {

// Runs `rounds` rounds on `seed` (at least 64 random floats in [-1, 1]) and
// returns the floating-point operations done; `sink` keeps the result alive.
using FlopKernel = double (*)(size_t rounds, const float* seed, float* sink);

// a[i] = b[i] + s * c[i], or a[i] = b[i] where c is null, over `count` floats,
// a multiple of 1024; arrays are aligned to 64 bytes. `stream` writes past the
// caches.
using StreamKernel = void (*)(float* a, const float* b, const float* c,
                              size_t count, bool stream);

// Functions of one Highway target. Two variants of each kernel, with 12 and
// with 24 accumulators: the first fits 16 vector registers, the second hides
// four-cycle latency on cores with four units.
struct VectorKernels {
  FlopKernel f32_fma[2];
  FlopKernel f64_fma[2];
  StreamKernel stream;
};
// Of the target named (lower case), or of the best one that this CPU has.
VectorKernels VectorKernelsOf(const std::string& target);

// Null where this build or CPU lacks the unit.
FlopKernel Bf16DotKernel();
// Asks the kernel for permission to use tile data, once per process.
FlopKernel AmxBf16Kernel();

}  // namespace fa2::peak

#endif  // FA2_BENCH_PEAK_PEAK_KERNELS_H_
