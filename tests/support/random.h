// SPDX-License-Identifier: Apache-2.0

// Random numbers that are the same on every platform.
#ifndef FA2_TESTS_SUPPORT_RANDOM_H_
#define FA2_TESTS_SUPPORT_RANDOM_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace fa2::test {

// The standard fixes mt19937_64's bits but not its distributions' results.
class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}

  uint64_t Bits() { return bits_(); }
  // In [0, 1).
  double Uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }
  double Uniform(double low, double high) {
    return low + (high - low) * Uniform();
  }
  // In [low, high].
  int64_t Integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits_() %
                                      static_cast<uint64_t>(high - low + 1));
  }
  bool Chance(double probability) { return Uniform() < probability; }
  template <class T>
  T Pick(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(
        Integer(0, static_cast<int64_t>(choices.size()) - 1))];
  }
  // Standard normal (Box and Muller 1958).
  double Normal() {
    if (have_spare_) {
      have_spare_ = false;
      return spare_;
    }
    const double radius = std::sqrt(-2.0 * std::log(1.0 - Uniform()));
    const double angle = 6.283185307179586 * Uniform();
    spare_ = radius * std::sin(angle);
    have_spare_ = true;
    return radius * std::cos(angle);
  }

 private:
  std::mt19937_64 bits_;
  double spare_ = 0.0;
  bool have_spare_ = false;
};

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_RANDOM_H_
