// SPDX-License-Identifier: Apache-2.0

// Views that share memory are refused, views that interleave are not, whatever
// function they are given to: checked through Transpose2d, whose in and out may
// have any strides between rows.
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "fa2/training_ops.h"

namespace fa2::test {
namespace {

constexpr int64_t kFloats = 4096;

// Addresses of all elements, as indices.
std::vector<int64_t> Elements(const ConstTensorView& view, const float* base) {
  std::vector<int64_t> all;
  const int64_t first = static_cast<const float*>(view.data) - base;
  const auto& n = view.sizes;
  for (int64_t a = 0; a < n[0]; ++a) {
    for (int64_t b = 0; b < n[1]; ++b) {
      for (int64_t c = 0; c < n[2]; ++c) {
        for (int64_t d = 0; d < n[3]; ++d) {
          all.push_back(first + a * view.strides[0] + b * view.strides[1] +
                        c * view.strides[2] + d * view.strides[3]);
        }
      }
    }
  }
  return all;
}

TEST(Overlap, SharedMemoryIsNeverAccepted) {
  std::vector<float> memory(kFloats, 1.0f);
  std::mt19937 random(1);
  const auto draw = [&random](int64_t least, int64_t most) {
    return least + static_cast<int64_t>(
                       random() % static_cast<uint32_t>(most - least + 1));
  };
  int accepted = 0, interleaved = 0;
  for (int round = 0; round < 20000; ++round) {
    const int64_t rows = draw(1, 4), cols = draw(1, 4), heads = draw(1, 3);
    TensorView in, out;
    in.dtype = out.dtype = DType::kF32;
    in.sizes = {1, heads, rows, cols};
    out.sizes = {1, heads, cols, rows};
    const int64_t pitch = draw(1, 24);
    in.strides = {0, draw(0, 3) * pitch, pitch, 1};
    out.strides = {0, draw(0, 60), draw(0, 1) == 0 ? pitch : draw(0, 24), 1};
    in.data = memory.data() + 1000 + draw(0, 40);
    out.data = memory.data() + 1000 + draw(0, 40);
    const Status status = Transpose2d(in, out);
    if (!status.ok()) {
      ASSERT_EQ(status.code(), StatusCode::kInvalidArgument);
      continue;
    }
    ++accepted;
    const std::vector<int64_t> from = Elements(in, memory.data());
    const std::vector<int64_t> to = Elements(out, memory.data());
    const std::set<int64_t> reads(from.begin(), from.end());
    const std::set<int64_t> writes(to.begin(), to.end());
    ASSERT_EQ(writes.size(), to.size()) << "an element is written twice";
    for (const int64_t at : writes) ASSERT_EQ(reads.count(at), 0u);
    if (*reads.begin() < *writes.rbegin() && *writes.begin() < *reads.rbegin())
      ++interleaved;
  }
  EXPECT_GT(accepted, 500);
  EXPECT_GT(interleaved, 50);
}

// Columns of two packed arrays with different numbers of them: their rows
// repeat with pitches whose common divisor tells them apart.
TEST(Overlap, PitchesWithACommonDivisor) {
  std::vector<float> memory(kFloats, 1.0f);
  TensorView in = Dense(memory.data(), DType::kF32, 1, 1, 2, 2);
  TensorView out = Dense(memory.data() + 2, DType::kF32, 1, 1, 2, 2);
  in.strides[2] = 8;
  out.strides[2] = 12;
  EXPECT_TRUE(Transpose2d(in, out).ok());
  out.data = memory.data() + 1;
  EXPECT_EQ(Transpose2d(in, out).message(),
            "out overlaps the input in; inputs are never written");
}

}  // namespace
}  // namespace fa2::test
