// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tensor.h"

#include <algorithm>
#include <cstring>

namespace fa2::test {
namespace {

int64_t Offset(const ConstTensorView& view, const Sizes& index) {
  int64_t offset = 0;
  for (size_t i = 0; i < 4; ++i) offset += index[i] * view.strides[i];
  return offset;
}

// Lowest and one past the highest element offset of a view that is not empty.
struct Extent {
  int64_t low = 0;
  int64_t high = 1;
};

Extent ExtentOf(const Sizes& sizes, const Sizes& strides) {
  Extent extent;
  for (size_t i = 0; i < 4; ++i) {
    const int64_t reach = (sizes[i] - 1) * strides[i];
    (reach < 0 ? extent.low : extent.high) += reach;
  }
  return extent;
}

Sizes StridesOf(const Sizes& sizes, Layout layout) {
  const auto [b, h, n, d] = sizes;
  (void)b;
  switch (layout) {
    case Layout::kBhsd:
      break;
    case Layout::kBshd:
      return {n * h * d, d, h * d, 1};
    case Layout::kPaddedRows:
      return {h * n * (d + 5), n * (d + 5), d + 5, 1};
    case Layout::kReversed:
      return {h * n * d, -n * d, -d, 1};
    case Layout::kStridedLast:
      return {h * n * d * 2, n * d * 2, d * 2, 2};
  }
  return {h * n * d, n * d, d, 1};
}

}  // namespace

std::string Text(const Sizes& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < 4; ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(sizes[i]);
  }
  return text + "]";
}

int64_t Elements(const Sizes& sizes) {
  return sizes[0] * sizes[1] * sizes[2] * sizes[3];
}

const char* NameOf(Layout layout) {
  constexpr const char* kNames[] = {"bhsd", "bshd", "padded_rows", "reversed",
                                    "strided_last"};
  return kNames[static_cast<size_t>(layout)];
}

Tensor MakeTensor(DType dtype, const Sizes& sizes, Layout layout,
                  std::array<bool, 4> broadcast) {
  Sizes stored = sizes;
  for (size_t i = 0; i < 4; ++i) {
    if (broadcast[i]) stored[i] = std::min<int64_t>(stored[i], 1);
  }
  Sizes strides = StridesOf(stored, layout);
  for (size_t i = 0; i < 4; ++i) {
    if (broadcast[i]) strides[i] = 0;
  }
  const Extent extent =
      Elements(sizes) > 0 ? ExtentOf(sizes, strides) : Extent();
  Tensor tensor;
  tensor.buffer = std::make_shared<Buffer>(
      static_cast<size_t>(extent.high - extent.low) * SizeOf(dtype),
      layout == Layout::kBhsd ? 64 : 1);
  tensor.view = {
      tensor.buffer->data() - extent.low * static_cast<int64_t>(SizeOf(dtype)),
      dtype, sizes, strides};
  return tensor;
}

std::vector<Tensor> MakePacked(DType dtype, int64_t batch,
                               const std::vector<int64_t>& heads, int64_t rows,
                               int64_t depth) {
  int64_t all_heads = 0;
  for (const int64_t h : heads) all_heads += h;
  const int64_t row = all_heads * depth;
  const auto buffer = std::make_shared<Buffer>(
      static_cast<size_t>(batch * rows * row) * SizeOf(dtype));
  std::vector<Tensor> tensors;
  int64_t first = 0;
  for (const int64_t h : heads) {
    uint8_t* const data =
        buffer->data() + static_cast<size_t>(first * depth) * SizeOf(dtype);
    tensors.push_back(
        {buffer,
         {data, dtype, {batch, h, rows, depth}, {rows * row, depth, row, 1}}});
    first += h;
  }
  return tensors;
}

void Set(const TensorView& view, const Sizes& index, double value) {
  const int64_t offset = Offset(view, index);
  switch (view.dtype) {
    case DType::kBool:
      static_cast<uint8_t*>(view.data)[offset] = value != 0.0;
      break;
    case DType::kU8:
      static_cast<uint8_t*>(view.data)[offset] = static_cast<uint8_t>(value);
      break;
    case DType::kI32:
      static_cast<int32_t*>(view.data)[offset] = static_cast<int32_t>(value);
      break;
    case DType::kI64:
      static_cast<int64_t*>(view.data)[offset] = static_cast<int64_t>(value);
      break;
    default:
      reference::Store({static_cast<uint8_t*>(view.data) +
                            offset * static_cast<int64_t>(SizeOf(view.dtype)),
                        view.dtype,
                        {1, 1, 1, 1},
                        {0, 0, 0, 0}},
                       0, 0, 0, 0, value);
  }
}

void FillNormal(const TensorView& view, Random& random, double sigma,
                double mean) {
  ForEachIndex(view.sizes, [&](const Sizes& index) {
    Set(view, index, mean + sigma * random.Normal());
  });
}

void Fill(const TensorView& view, double value) {
  ForEachIndex(view.sizes,
               [&](const Sizes& index) { Set(view, index, value); });
}

void Copy(const ConstTensorView& from, const TensorView& to) {
  ForEachIndex(to.sizes,
               [&](const Sizes& index) { Set(to, index, Get(from, index)); });
}

bool SameBits(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.sizes != b.sizes || a.dtype != b.dtype) return false;
  const auto size = static_cast<int64_t>(SizeOf(a.dtype));
  bool same = true;
  ForEachIndex(a.sizes, [&](const Sizes& index) {
    same &= std::memcmp(
                static_cast<const uint8_t*>(a.data) + Offset(a, index) * size,
                static_cast<const uint8_t*>(b.data) + Offset(b, index) * size,
                static_cast<size_t>(size)) == 0;
  });
  return same;
}

}  // namespace fa2::test
