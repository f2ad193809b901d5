// SPDX-License-Identifier: Apache-2.0

// What this machine can do at most, measured in the running process: the
// denominators of every share that a benchmark prints, and what Python's info()
// gives.
#ifndef FA2_BENCH_PEAK_PEAK_H_
#define FA2_BENCH_PEAK_PEAK_H_

#include <string>

namespace fa2::peak {

// Arithmetic units that a matrix engine can be bound by.
enum class Unit {
  kF32Fma,   // fused multiply-add on f32 vectors
  kF64Fma,   // the same on f64
  kBf16Dot,  // pairs of bf16 summed into f32: VDPBF16PS
  kAmxBf16,  // bf16 tiles into f32 tiles: TDPBF16PS
};

// The unit behind an engine's name ("f32", "f64", "bf16dot", "amx").
Unit UnitOfEngine(const std::string& engine);

// Floating-point operations per second (a multiply-add counts two) of `threads`
// threads at once on register-resident random data; 0 where this build or CPU
// lacks the unit or the system gives no more threads. Vector units are measured
// on the Highway target named `target` in lower case, or on the best one where
// that is empty or unknown. Takes about 60 ms; the result is the median of
// short rounds.
double MeasurePeak(Unit unit, int threads, const std::string& target = "");

// Bytes per second, read and written together, of `threads` threads at once
// over arrays several times larger than the last-level cache.
struct Bandwidth {
  double copy = 0;   // a[i] = b[i]
  double triad = 0;  // a[i] = b[i] + s * c[i]
};
Bandwidth MeasureBandwidth(int threads, const std::string& target = "");

}  // namespace fa2::peak

#endif  // FA2_BENCH_PEAK_PEAK_H_
