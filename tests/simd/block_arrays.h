// SPDX-License-Identifier: Apache-2.0

// Memory, tensors and sums of errors of a block-level problem.
#ifndef FA2_TESTS_SIMD_BLOCK_ARRAYS_H_
#define FA2_TESTS_SIMD_BLOCK_ARRAYS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "fa2/types.h"
#include "src/common/half.h"
#include "src/simd/engine.h"

namespace fa2::simd {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Aligned storage that starts as garbage, so that nothing passes because fresh
// memory happens to be 0. Fails the test if anything writes behind it.
class Bytes {
 public:
  explicit Bytes(size_t size)
      : size_((size + 63) / 64 * 64),
        data_(static_cast<uint8_t*>(std::aligned_alloc(64, size_ + kGuard))) {
    std::memset(data_.get(), kGarbage, size_ + kGuard);
  }
  Bytes(Bytes&&) = default;
  ~Bytes() {
    if (data_ == nullptr) return;
    const uint8_t* const end = data_.get() + size_;
    EXPECT_EQ(std::count(end, end + kGuard, kGarbage), kGuard)
        << "written behind " << size_ << " bytes";
  }
  uint8_t* get() const { return data_.get(); }

 private:
  static constexpr uint8_t kGarbage = 0x7f;
  static constexpr ptrdiff_t kGuard = 4096;
  size_t size_;
  std::unique_ptr<uint8_t, Free> data_;
};

// Engines load row vectors with aligned instructions.
template <typename T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <typename U>
  AlignedAllocator(const AlignedAllocator<U>&) {}
  T* allocate(size_t n) {
    return static_cast<T*>(
        ::operator new (n * sizeof(T), std::align_val_t{64}));
  }
  void deallocate(T* p, size_t) { ::operator delete (p, std::align_val_t{64}); }
  bool operator==(const AlignedAllocator&) const { return true; }
  bool operator!=(const AlignedAllocator&) const { return false; }
};
template <typename T>
using Array = std::vector<T, AlignedAllocator<T>>;

// Rows of a tensor as the engine reads them, and their exact values.
class Tensor {
 public:
  Tensor(int64_t rows, int64_t depth, DType dtype)
      : rows_(rows), depth_(depth), stride_(depth + 3), dtype_(dtype) {
    values_.resize(rows * depth);
    storage_.resize(rows * stride_ * SizeOf(dtype) + 64);
  }
  template <class Random>
  void Fill(Random& random, double scale) {
    std::normal_distribution<double> normal(0.0, scale);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t d = 0; d < depth_; ++d) Set(r, d, normal(random));
    }
  }
  void Set(int64_t r, int64_t d, double value) {
    uint8_t* at = storage_.data() + (r * stride_ + d) * SizeOf(dtype_);
    const float x = static_cast<float>(value);
    if (dtype_ == DType::kBF16) {
      const uint16_t bits = F32ToBf16(x);
      std::memcpy(at, &bits, 2);
      values_[r * depth_ + d] = Bf16ToF32(bits);
    } else if (dtype_ == DType::kF16) {
      const uint16_t bits = F32ToF16(x);
      std::memcpy(at, &bits, 2);
      values_[r * depth_ + d] = F16ToF32(bits);
    } else if (dtype_ == DType::kF64) {
      std::memcpy(at, &value, 8);
      values_[r * depth_ + d] = value;
    } else {
      std::memcpy(at, &x, 4);
      values_[r * depth_ + d] = x;
    }
  }
  const double* Row(int64_t r) const { return &values_[r * depth_]; }
  Rows View() const {
    return {storage_.data(), dtype_, stride_, rows_, depth_};
  }

 private:
  int64_t rows_, depth_, stride_;
  DType dtype_;
  std::vector<double> values_;
  std::vector<uint8_t> storage_;
};

class Errors {
 public:
  void Add(double got, double want) {
    if (std::isnan(want)) return;
    const double e = got - want;
    error_ += std::isfinite(e) ? e * e : kInfinity;
    norm_ += want * want;
  }
  double Relative() const {
    if (error_ == 0.0) return 0.0;
    return norm_ == 0.0 ? kInfinity : std::sqrt(error_ / norm_);
  }

 private:
  double error_ = 0.0;
  double norm_ = 0.0;
};

}  // namespace fa2::simd

#endif  // FA2_TESTS_SIMD_BLOCK_ARRAYS_H_
