// SPDX-License-Identifier: Apache-2.0

// Row statistics (lse, dlse, delta) are [B, H, N]: made by three sizes,
// accepted by rows and padded, and named by three sizes where they are refused.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "fa2/attention.h"
#include "fa2/fa2_c.h"
#include "fa2/types.h"

namespace fa2::test {
namespace {

using Sizes = std::array<int64_t, 4>;

TEST(StatisticsView, ThreeSizesMakeTheViewOfFour) {
  float data[24] = {};
  const TensorView view = Dense(data, DType::kF32, 2, 3, 4);
  const TensorView four = Dense(data, DType::kF32, 2, 3, 4, 1);
  EXPECT_EQ(view.data, four.data);
  EXPECT_EQ(view.sizes, four.sizes);
  EXPECT_EQ(view.strides, four.strides);
  const ConstTensorView reversed = Strided(static_cast<const float*>(data) + 3,
                                           DType::kF32, {2, 3, 4}, {12, 4, -1});
  EXPECT_EQ(reversed.data, data + 3);
  EXPECT_EQ(reversed.sizes, (Sizes{2, 3, 4, 1}));
  EXPECT_EQ(reversed.strides[0], 12);
  EXPECT_EQ(reversed.strides[2], -1);

  const fa2_tensor c = fa2_dense_rows(data, FA2_F32, 2, 3, 4);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(c.sizes[i], view.sizes[i]);
    EXPECT_EQ(c.strides[i], view.strides[i]);
  }
  EXPECT_EQ(fa2_dense_rows_const(data, FA2_F32, 2, 3, 4).data, data);
}

// Two heads of five packed rows, in sequences of 2 and 3.
struct Packed {
  static constexpr int64_t kHeads = 2, kRows = 5, kDim = 4;
  std::vector<float> q = std::vector<float>(kHeads * kRows * kDim, 0.5f);
  std::vector<float> out = q;
  std::vector<int32_t> sums = {0, 2, 5};
  AttentionForwardArgs args;

  Packed() {
    args.q = args.k = args.v = Dense(static_cast<const float*>(q.data()),
                                     DType::kF32, 1, kHeads, kRows, kDim);
    args.out = Dense(out.data(), DType::kF32, 1, kHeads, kRows, kDim);
    args.options.cu_seqlens_q = args.options.cu_seqlens_k = Dense(
        static_cast<const int32_t*>(sums.data()), DType::kI32, 1, 1, 1, 3);
  }
};

TEST(StatisticsView, PackedByRowsOrPadded) {
  Packed p;
  std::vector<float> rows(2 * 5), padded(2 * 2 * 4, -7.0f);
  p.args.lse = Dense(rows.data(), DType::kF32, 1, 2, 5);
  Status status = AttentionForward(p.args);
  ASSERT_TRUE(status.ok()) << status.message();
  p.args.lse = Dense(padded.data(), DType::kF32, 2, 2, 4);
  status = AttentionForward(p.args);
  ASSERT_TRUE(status.ok()) << status.message();
  for (size_t h = 0; h < 2; ++h) {
    for (size_t i = 0; i < 5; ++i) {
      const size_t sequence = i < 2 ? 0 : 1;
      const size_t row = i - 2 * sequence;
      EXPECT_EQ(rows[h * 5 + i], padded[(sequence * 2 + h) * 4 + row]);
    }
    EXPECT_EQ(padded[h * 4 + 2], -7.0f);
    EXPECT_EQ(padded[(2 + h) * 4 + 3], -7.0f);
  }
}

TEST(StatisticsView, RefusedByThreeSizes) {
  Packed p;
  std::vector<float> lse(64);
  p.args.lse = Dense(lse.data(), DType::kF32, 2, 2, 2);
  EXPECT_EQ(AttentionForward(p.args).message(),
            "lse has shape [2, 2, 2]; it must be [2, 2, 3], [sequences, Hq, "
            "longest or more], or [1, Hq, total_q]");
  p.args.options.cu_seqlens_q = p.args.options.cu_seqlens_k = {};
  p.args.lse = Dense(lse.data(), DType::kF32, 1, 2, 4);
  EXPECT_EQ(AttentionForward(p.args).message(),
            "lse has shape [1, 2, 4]; it must be [1, 2, 5], [B, Hq, Nq] of q");
  p.args.lse = Dense(lse.data(), DType::kF32, 1, 2, 5, 2);
  EXPECT_EQ(AttentionForward(p.args).message(),
            "lse has shape [1, 2, 5, 2]; it must be [1, 2, 5], [B, Hq, Nq] of "
            "q");
}

}  // namespace
}  // namespace fa2::test
