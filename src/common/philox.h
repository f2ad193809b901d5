// SPDX-License-Identifier: Apache-2.0

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011), and dropout's mapping of its outputs to elements of
// the score matrix.
#ifndef FA2_SRC_COMMON_PHILOX_H_
#define FA2_SRC_COMMON_PHILOX_H_

#include <array>
#include <cstdint>

namespace fa2 {

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;  // golden ratio
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;  // sqrt(3) - 1

// The four 32-bit words of block `counter` (128 bits, lowest word first).
inline std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                          std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * counter[0];
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += kPhiloxWeyl0;
    key[1] += kPhiloxWeyl1;
  }
  return counter;
}

// Output number n of the stream of `seed`, subsequence 0: word n mod 4 of
// block n div 4.
inline uint32_t PhiloxOutput(uint64_t seed, uint64_t n) {
  const uint64_t block = n / 4;
  return Philox4x32(
      {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0u,
       0u},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)})[n % 4];
}

// An output as a number in (0, 1], x * 2^-32 + 2^-33 in f32.
inline float PhiloxUniform(uint32_t x) {
  return static_cast<float>(x) * 2.3283064365386963e-10f +
         1.1641532182693481e-10f;
}

// Whether dropout with probability p keeps the element of output number n.
inline bool PhiloxKeep(double p, uint64_t seed, uint64_t n) {
  return PhiloxUniform(PhiloxOutput(seed, n)) > static_cast<float>(p);
}

}  // namespace fa2

#endif  // FA2_SRC_COMMON_PHILOX_H_
