// SPDX-License-Identifier: Apache-2.0

// What the tests of the training kernels share: arrays with padding that must
// survive, a context for every target and several numbers of threads, and
// comparison with float64 under a bound for each element.
#ifndef FA2_TESTS_OPS_OPS_TEST_UTIL_H_
#define FA2_TESTS_OPS_OPS_TEST_UTIL_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fa2/training_ops.h"
#include "src/common/half.h"
#include "tests/support/random.h"

namespace fa2::test {

inline constexpr double kEps = 5.9604644775390625e-8;  // 2^-24: f32 rounding

inline float FromBf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// Nearest bf16, ties to even.
inline uint16_t ToBf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  if (std::isnan(f)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Half a unit in the last place of 1 in what a kernel computes dtype in.
inline double Eps(DType dtype) { return dtype == DType::kF64 ? 0x1p-53 : kEps; }

// Largest error of rounding a result near x when it is stored.
inline double StoreError(DType dtype, double x) {
  switch (dtype) {
    case DType::kBF16:
      return std::abs(x) * 0x1p-8 + 1e-37;
    case DType::kF16:
      return std::abs(x) * 0x1p-11 + 0x1p-25;  // half a subnormal step
    case DType::kF64:
      return std::abs(x) * 0x1p-52 + 1e-300;
    default:
      return std::abs(x) * 0x1p-23 + 1e-37;
  }
}

// A dense or row-padded array of a float dtype [1, 1, rows, dim]. Memory
// between the rows holds a pattern.
class Array {
 public:
  Array(DType dtype, int64_t rows, int64_t dim, int64_t padding = 0)
      : dtype_(dtype), rows_(rows), dim_(dim), stride_(dim + padding) {
    bytes_.assign(
        static_cast<size_t>(rows * stride_) * SizeOf(dtype) + kOffset + 64,
        0xA5);
  }

  TensorView view() {
    TensorView view = Dense(bytes_.data() + kOffset, dtype_, 1, 1, rows_, dim_);
    view.strides[2] = stride_;
    view.strides[1] = view.strides[0] = rows_ * stride_;
    return view;
  }

  double Get(int64_t row, int64_t i) const {
    const uint8_t* p = At(row, i);
    if (dtype_ == DType::kBF16) {
      uint16_t x;
      std::memcpy(&x, p, sizeof x);
      return FromBf16(x);
    }
    if (dtype_ == DType::kF16) {
      uint16_t x;
      std::memcpy(&x, p, sizeof x);
      return F16ToF32(x);
    }
    if (dtype_ == DType::kF64) {
      double x;
      std::memcpy(&x, p, sizeof x);
      return x;
    }
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  void Set(int64_t row, int64_t i, float value) {
    uint8_t* p = const_cast<uint8_t*>(At(row, i));
    if (dtype_ == DType::kBF16) {
      const uint16_t x = ToBf16(value);
      std::memcpy(p, &x, sizeof x);
    } else if (dtype_ == DType::kF16) {
      const uint16_t x = F32ToF16(value);
      std::memcpy(p, &x, sizeof x);
    } else if (dtype_ == DType::kF64) {
      const double x = value;
      std::memcpy(p, &x, sizeof x);
    } else {
      std::memcpy(p, &value, sizeof value);
    }
  }
  // Of a value that the dtype holds.
  void SetExactly(int64_t row, int64_t i, double value) {
    if (dtype_ == DType::kF64) {
      std::memcpy(const_cast<uint8_t*>(At(row, i)), &value, sizeof value);
    } else {
      Set(row, i, static_cast<float>(value));
    }
  }
  void Fill(const std::function<float()>& next) {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t i = 0; i < dim_; ++i) Set(row, i, next());
    }
  }

  // Whether all bytes that are no elements still hold the pattern.
  bool PaddingIntact() const {
    const size_t size = SizeOf(dtype_);
    for (size_t b = 0; b < bytes_.size(); ++b) {
      if (b >= kOffset) {
        const auto at = static_cast<int64_t>((b - kOffset) / size);
        if (stride_ > 0 && at / stride_ < rows_ && at % stride_ < dim_)
          continue;
      }
      if (bytes_[b] != 0xA5) return false;
    }
    return true;
  }

  DType dtype() const { return dtype_; }
  int64_t rows() const { return rows_; }
  int64_t dim() const { return dim_; }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  // Rows start off the vectors' alignment, as NumPy's often do.
  static constexpr size_t kOffset = 16;
  const uint8_t* At(int64_t row, int64_t i) const {
    return bytes_.data() + kOffset +
           static_cast<size_t>(row * stride_ + i) * SizeOf(dtype_);
  }

  DType dtype_;
  int64_t rows_, dim_, stride_;
  std::vector<uint8_t> bytes_;
};

inline std::function<float()> Normal(uint32_t seed, float sigma = 1.0f) {
  return [random = Random(seed), sigma]() mutable {
    return sigma * static_cast<float>(random.Normal());
  };
}

inline TensorView Vector(void* data, DType dtype, int64_t n) {
  return Dense(data, dtype, 1, 1, 1, n);
}

inline std::unique_ptr<Context> MakeContext(const std::string& target,
                                            int threads) {
  ContextOptions options;
  options.max_target = target;
  options.num_threads = threads;
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  EXPECT_TRUE(status.ok()) << status.message();
  return context;
}

inline std::vector<std::string> Targets() {
  const auto context = MakeContext("", 1);
  if (context == nullptr) return {};  // which has failed the test
  return context->Info().targets;
}

// Calls run(context) on every target. What it returns, the bytes of all
// outputs, must not change with 2, 3 and 4 threads; check() is called with the
// outputs of one thread still in place.
inline void OnAllTargets(
    const std::function<std::vector<uint8_t>(Context*)>& run,
    const std::function<void()>& check) {
  for (const std::string& target : Targets()) {
    SCOPED_TRACE("target " + target);
    const auto serial = MakeContext(target, 1);
    const std::vector<uint8_t> expected = run(serial.get());
    check();
    if (::testing::Test::HasFailure()) return;
    for (const int threads : {2, 3, 4}) {
      const auto context = MakeContext(target, threads);
      EXPECT_EQ(run(context.get()), expected) << threads << " threads";
    }
  }
}

inline void ExpectOk(const Status& status) {
  ASSERT_TRUE(status.ok()) << status.message();
}

// Each element of `actual` within bound(row, i) of value(row, i).
inline void ExpectNear(const char* name, const Array& actual,
                       const std::function<double(int64_t, int64_t)>& value,
                       const std::function<double(int64_t, int64_t)>& bound) {
  for (int64_t row = 0; row < actual.rows(); ++row) {
    for (int64_t i = 0; i < actual.dim(); ++i) {
      const double want = value(row, i);
      const double limit = bound(row, i) + StoreError(actual.dtype(), want);
      const double got = actual.Get(row, i);
      ASSERT_TRUE(std::abs(got - want) <= limit)
          << name << "[" << row << ", " << i << "] is " << got
          << "; it must be " << want << " within " << limit;
    }
  }
}

}  // namespace fa2::test

#endif  // FA2_TESTS_OPS_OPS_TEST_UTIL_H_
