// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "tests/ops/ops_test_util.h"

namespace fa2::test {
namespace {

template <typename T>
DType DTypeOf() {
  return sizeof(T) == 2 ? DType::kF16
                        : (sizeof(T) == 4 ? DType::kI32 : DType::kF64);
}

// Every element is its own index, so a misplaced one is seen.
template <typename T>
void TestTranspose(int64_t rows, int64_t cols, int64_t in_padding,
                   int64_t out_padding) {
  SCOPED_TRACE(std::to_string(sizeof(T)) + " bytes, " + std::to_string(rows) +
               " x " + std::to_string(cols));
  const int64_t in_stride = cols + in_padding;
  const int64_t out_stride = rows + out_padding;
  const int64_t matrices = 3;
  std::vector<T> in(static_cast<size_t>(matrices * rows * in_stride) + 1);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<T>(i * 40503u);
  std::vector<T> out(static_cast<size_t>(matrices * cols * out_stride) + 1);
  ConstTensorView from = Dense(in.data(), DTypeOf<T>(), 1, 3, rows, cols);
  from.strides = {0, rows * in_stride, in_stride, 1};
  TensorView to = Dense(out.data(), DTypeOf<T>(), 1, 3, cols, rows);
  to.strides = {0, cols * out_stride, out_stride, 1};
  const T fill = static_cast<T>(12345);
  OnAllTargets(
      [&](Context* context) {
        std::fill(out.begin(), out.end(), fill);
        ExpectOk(Transpose2d(from, to, context));
        const auto* bytes = reinterpret_cast<const uint8_t*>(out.data());
        return std::vector<uint8_t>(bytes, bytes + out.size() * sizeof(T));
      },
      [&] {
        for (int64_t m = 0; m < matrices; ++m) {
          for (int64_t c = 0; c < cols; ++c) {
            for (int64_t r = 0; r < out_stride; ++r) {
              const T got =
                  out[static_cast<size_t>((m * cols + c) * out_stride + r)];
              const T want =
                  r < rows
                      ? in[static_cast<size_t>((m * rows + r) * in_stride + c)]
                      : fill;
              ASSERT_EQ(got, want) << m << ", " << c << ", " << r;
            }
          }
        }
        EXPECT_EQ(out.back(), fill);
      });
}

TEST(Transpose, AllSizes) {
  for (const auto& [rows, cols] :
       std::vector<std::tuple<int64_t, int64_t>>{{0, 5},
                                                 {5, 0},
                                                 {1, 1},
                                                 {1, 67},
                                                 {67, 1},
                                                 {2, 3},
                                                 {7, 8},
                                                 {15, 17},
                                                 {31, 33},
                                                 {63, 65},
                                                 {64, 64},
                                                 {65, 63},
                                                 {127, 131},
                                                 {97, 521}}) {
    TestTranspose<uint16_t>(rows, cols, 0, 0);
    TestTranspose<uint32_t>(rows, cols, 0, 0);
    TestTranspose<uint64_t>(rows, cols, 0, 0);
    TestTranspose<uint16_t>(rows, cols, 3, 5);
    TestTranspose<uint32_t>(rows, cols, 2, 1);
    TestTranspose<uint64_t>(rows, cols, 1, 2);
  }
}

// 12 MiB: written by non-temporal stores, from every alignment of the output.
TEST(Transpose, LargeAtAllAlignments) {
  constexpr int64_t kRows = 1024;
  constexpr int64_t kCols = 1031;
  constexpr int64_t kMatrices = 3;
  std::vector<float> in(kMatrices * kRows * kCols);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
  for (const std::string& target : Targets()) {
    const auto context = MakeContext(target, 2);
    for (const size_t offset : {0, 1, 4, 15}) {
      std::vector<float> out(in.size() + 16, -1.0f);
      ExpectOk(Transpose2d(
          Dense(static_cast<const float*>(in.data()), DType::kF32, kMatrices, 1,
                kRows, kCols),
          Dense(out.data() + offset, DType::kF32, kMatrices, 1, kCols, kRows),
          context.get()));
      size_t wrong = 0;
      for (int64_t m = 0; m < kMatrices; ++m) {
        for (int64_t c = 0; c < kCols; ++c) {
          for (int64_t r = 0; r < kRows; ++r) {
            wrong += out[offset +
                         static_cast<size_t>((m * kCols + c) * kRows + r)] !=
                     in[static_cast<size_t>((m * kRows + r) * kCols + c)];
          }
        }
      }
      EXPECT_EQ(wrong, 0u) << target << ", offset " << offset;
      for (size_t i = 0; i < offset; ++i) EXPECT_EQ(out[i], -1.0f);
      for (size_t i = offset + in.size(); i < out.size(); ++i) {
        EXPECT_EQ(out[i], -1.0f);
      }
    }
  }
}

}  // namespace
}  // namespace fa2::test
