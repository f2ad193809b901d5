// SPDX-License-Identifier: Apache-2.0

// Calls that must be refused: the sentence names the argument, what it is and
// what it must be, and no output has changed.
#include <functional>
#include <string>
#include <vector>

#include "tests/ops/ops_test_util.h"

namespace fa2::test {
namespace {

constexpr int64_t kRows = 4;
constexpr int64_t kDim = 6;

class OpErrors : public ::testing::Test {
 protected:
  OpErrors() {
    for (Array* a : {&x_, &dy_, &weight_, &out_, &dweight_}) a->Fill(Normal(1));
  }

  // The call fails with this sentence and leaves every array as it was.
  void Expect(const Status& status, const std::string& sentence) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), sentence);
    EXPECT_EQ(out_.bytes(), out_before_);
    EXPECT_EQ(dweight_.bytes(), dweight_before_);
    EXPECT_EQ(loss_, 0.5f);
  }
  void Save() {
    out_before_ = out_.bytes();
    dweight_before_ = dweight_.bytes();
  }
  void SetUp() override { Save(); }

  RmsNormBackwardArgs RmsArgs() {
    RmsNormBackwardArgs args;
    args.dy = dy_.view();
    args.x = x_.view();
    args.weight = weight_.view();
    args.dx = out_.view();
    args.dweight = dweight_.view();
    return args;
  }
  EmbeddingBackwardArgs EmbeddingArgs() {
    EmbeddingBackwardArgs args;
    args.dy = dy_.view();
    args.ids = Vector(ids_.data(), DType::kI64, kRows);
    args.dweight = out_.view();
    return args;
  }
  CrossEntropyArgs LossArgs() {
    CrossEntropyArgs args;
    args.logits = x_.view();
    args.targets = Vector(ids_.data(), DType::kI64, kRows);
    args.loss = Vector(&loss_, DType::kF32, 1);
    args.dlogits = out_.view();
    return args;
  }

  Array x_{DType::kF32, kRows, kDim}, dy_{DType::kF32, kRows, kDim};
  Array weight_{DType::kF32, 1, kDim};
  Array out_{DType::kF32, kRows, kDim}, dweight_{DType::kF32, 1, kDim};
  std::vector<int64_t> ids_ = {0, 3, 1, 3};
  float loss_ = 0.5f;
  std::vector<uint8_t> out_before_, dweight_before_;
};

TEST_F(OpErrors, Views) {
  ConstTensorView x = x_.view();
  x.dtype = DType::kI32;
  Expect(Softmax(x, out_.view()),
         "x has dtype i32; it must be f32 or bf16 or f16 or f64");
  x = x_.view();
  x.data = nullptr;
  Expect(Softmax(x, out_.view()),
         "x is null; it must point to [1, 1, 4, 6] elements");
  x = x_.view();
  x.data = static_cast<const uint8_t*>(x.data) + 2;
  Expect(Softmax(x, out_.view()),
         "x is not aligned; f32 data must be aligned to 4 bytes");
  x = x_.view();
  x.sizes[0] = -1;
  Expect(Softmax(x, out_.view()),
         "x has shape [-1, 1, 4, 6]; sizes must be 0 or more");
  x = x_.view();
  x.strides[2] = int64_t{1} << 61;
  Expect(Softmax(x, out_.view()),
         "x has shape [1, 1, 4, 6] and strides [24, 24, 2305843009213693952, "
         "1]; its elements must lie within 2^62 bytes");
  x = x_.view();
  x.strides[3] = 2;
  Expect(Softmax(x, out_.view()),
         "x has stride 2 in its last dimension; the elements of a row must be "
         "contiguous");
  TensorView y = out_.view();
  y.sizes[2] = 3;
  Expect(Softmax(x_.view(), y),
         "y has shape [1, 1, 3, 6]; it must be [1, 1, 4, 6], the shape of x");
  y = out_.view();
  y.dtype = DType::kBF16;
  Expect(Softmax(x_.view(), y), "y has dtype bf16; it must be f32, as x has");
  y = out_.view();
  y.strides[2] = 0;
  Expect(Softmax(x_.view(), y),
         "y has shape [1, 1, 4, 6] and strides [24, 24, 0, 1]; the elements of "
         "an output must not share memory");
}

TEST_F(OpErrors, Overlap) {
  Expect(Softmax(out_.view(), out_.view()),
         "y overlaps the input x; inputs are never written");
  Expect(SoftmaxBackward(out_.view(), x_.view(), out_.view()),
         "dx overlaps the input dy; inputs are never written");
  Expect(Transpose2d(out_.view(),
                     Dense(out_.view().data, DType::kF32, 1, 1, kDim, kRows)),
         "out overlaps the input in; inputs are never written");
  RmsNormBackwardArgs rms = RmsArgs();
  rms.dweight = Dense(static_cast<float*>(out_.view().data) + 20, DType::kF32,
                      1, 1, 1, kDim);
  Expect(RmsNormBackward(rms),
         "dweight overlaps dx; outputs must not share memory");
  rms = RmsArgs();
  rms.weight = dweight_.view();
  Expect(RmsNormBackward(rms),
         "dweight overlaps the input weight; inputs are never written");
  EmbeddingBackwardArgs embedding = EmbeddingArgs();
  embedding.dy = out_.view();
  Expect(EmbeddingBackward(embedding),
         "dweight overlaps the input dy; inputs are never written");
  CrossEntropyArgs loss = LossArgs();
  // The logits themselves may be overwritten, not those of another row.
  TensorView rows = out_.view();
  rows.sizes[2] = kRows - 1;
  loss.logits = rows;
  rows.data = static_cast<float*>(rows.data) + kDim;
  loss.dlogits = rows;
  loss.targets = Vector(ids_.data(), DType::kI64, kRows - 1);
  Expect(CrossEntropy(loss),
         "dlogits overlaps the input logits; inputs are never written");
}

// Columns of one array are separate views, although their bytes interleave.
TEST_F(OpErrors, InterleavedViewsDoNotOverlap) {
  Array packed(DType::kF32, kRows, 2 * kDim);
  packed.Fill(Normal(2));
  TensorView left = packed.view();
  left.sizes[3] = kDim;
  TensorView right = left;
  right.data = static_cast<float*>(right.data) + kDim;
  EXPECT_TRUE(Softmax(left, right).ok());
  EXPECT_TRUE(Softmax(right, left).ok());
  right.data = static_cast<float*>(right.data) - 1;
  EXPECT_EQ(Softmax(left, right).message(),
            "y overlaps the input x; inputs are never written");
  EXPECT_EQ(Softmax(right, left).message(),
            "y overlaps the input x; inputs are never written");
}

TEST_F(OpErrors, Transpose) {
  ConstTensorView in = x_.view();
  in.dtype = DType::kBool;
  EXPECT_EQ(Transpose2d(in, out_.view()).message(),
            "in has dtype bool; it must be f32 or bf16 or f16 or f64 or i32 or "
            "i64");
  Expect(Transpose2d(x_.view(), out_.view()),
         "out has shape [1, 1, 4, 6]; it must be [1, 1, 6, 4], the shape of in "
         "with "
         "its last two sizes swapped");
}

TEST_F(OpErrors, RmsNorm) {
  ConstTensorView weight = weight_.view();
  weight.sizes[3] = 5;
  Expect(RmsNorm(x_.view(), weight, 1e-5, out_.view()),
         "weight has shape [1, 1, 1, 5]; it must be [1, 1, 1, 6], a vector");
  weight = weight_.view();
  weight.dtype = DType::kBF16;
  Expect(RmsNorm(x_.view(), weight, 1e-5, out_.view()),
         "weight has dtype bf16; it must be f32, as x has");
  Expect(RmsNorm(x_.view(), weight_.view(), -1.0, out_.view()),
         "eps is -1.000000; it must be finite and 0 or more");
  RmsNormBackwardArgs args = RmsArgs();
  args.dy.sizes[2] = 3;
  Expect(RmsNormBackward(args),
         "dy has shape [1, 1, 3, 6]; it must be [1, 1, 4, 6], the shape of x");
  args = RmsArgs();
  args.dweight.sizes[3] = 7;
  Expect(RmsNormBackward(args),
         "dweight has shape [1, 1, 1, 7]; it must be [1, 1, 1, 6], a vector");
}

TEST_F(OpErrors, Embedding) {
  EmbeddingBackwardArgs args = EmbeddingArgs();
  ids_ = {0, 3, 4, -1};
  args.ids.data = ids_.data();
  Expect(EmbeddingBackward(args),
         "ids[2] is 4; it must be in [0, 4), the range of the rows of dweight");
  ids_ = {0, 3, 3, -1};
  Expect(EmbeddingBackward(args),
         "ids[3] is -1; it must be in [0, 4), the range of the rows of "
         "dweight");
  args.ids.sizes[3] = 3;
  Expect(EmbeddingBackward(args),
         "ids has shape [1, 1, 1, 3]; it must be [1, 1, 1, 4], a vector");
  args = EmbeddingArgs();
  args.ids.dtype = DType::kF32;
  Expect(EmbeddingBackward(args), "ids has dtype f32; it must be i32 or i64");
}

TEST_F(OpErrors, CrossEntropy) {
  CrossEntropyArgs args = LossArgs();
  ids_ = {0, 5, -100, 6};
  args.targets.data = ids_.data();
  Expect(CrossEntropy(args),
         "targets[3] is 6; it must be in [0, 6), the range of the vocabulary, "
         "or the ignored index -100");
  ids_ = {0, 5, -100, 5};
  args.count = -2;
  Expect(CrossEntropy(args), "count is -2; it must be 0 or more");
  args = LossArgs();
  args.loss.dtype = DType::kBF16;
  Expect(CrossEntropy(args), "loss has dtype bf16; it must be f32 or f64");
}

// A workspace that the context may not have: the error comes before the first
// write.
TEST_F(OpErrors, WorkspaceLimit) {
  ContextOptions options;
  options.memory_limit = 1;
  options.num_threads = 1;
  std::unique_ptr<Context> context;
  ASSERT_TRUE(Context::Create(options, &context).ok());
  EXPECT_EQ(RmsNormBackward(RmsArgs(), context.get()).code(),
            StatusCode::kOutOfMemory);
  EXPECT_EQ(EmbeddingBackward(EmbeddingArgs(), context.get()).code(),
            StatusCode::kOutOfMemory);
  EXPECT_EQ(CrossEntropy(LossArgs(), context.get()).code(),
            StatusCode::kOutOfMemory);
  EXPECT_EQ(out_.bytes(), out_before_);
  EXPECT_EQ(dweight_.bytes(), dweight_before_);
  EXPECT_EQ(loss_, 0.5f);
}

}  // namespace
}  // namespace fa2::test
