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
  // Draws are what the bytes say, two for each, so that whoever changes a byte
  // changes a draw; when they are used up, what follows from them all.
  Random(const uint8_t* bytes, size_t size)
      : bits_(HashOf(bytes, size)), next_(bytes), left_(size) {}

  uint64_t Bits() {
    if (left_ < 2) return bits_();
    const uint64_t two = next_[0] | uint64_t{next_[1]} << 8;
    next_ += 2;
    left_ -= 2;
    return two * 0x0001000100010001;  // high and low bits are drawn from
  }
  // In [0, 1).
  double Uniform() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }
  double Uniform(double low, double high) {
    return low + (high - low) * Uniform();
  }
  // In [low, high].
  int64_t Integer(int64_t low, int64_t high) {
    return low +
           static_cast<int64_t>(Bits() % static_cast<uint64_t>(high - low + 1));
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
  // FNV-1a.
  static uint64_t HashOf(const uint8_t* bytes, size_t size) {
    uint64_t hash = 0xCBF29CE484222325;
    for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001B3;
    return hash;
  }

  std::mt19937_64 bits_;
  const uint8_t* next_ = nullptr;
  size_t left_ = 0;
  double spare_ = 0.0;
  bool have_spare_ = false;
};

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_RANDOM_H_
