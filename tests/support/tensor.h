// SPDX-License-Identifier: Apache-2.0

// Tensors of any dtype and strides in guarded memory, filled from a seed.
#ifndef FA2_TESTS_SUPPORT_TENSOR_H_
#define FA2_TESTS_SUPPORT_TENSOR_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fa2/types.h"
#include "src/reference/tensor_access.h"
#include "tests/support/buffer.h"
#include "tests/support/random.h"

namespace fa2::test {

using Sizes = std::array<int64_t, 4>;

std::string Text(const Sizes& sizes);
int64_t Elements(const Sizes& sizes);

struct Tensor {
  std::shared_ptr<Buffer> buffer;
  TensorView view;

  bool given() const { return view.given(); }
};

enum class Layout {
  kBhsd,         // dense [B, H, N, D]
  kBshd,         // dense [B, N, H, D]
  kPaddedRows,   // [B, H, N, D] with a gap after each row
  kReversed,     // rows and heads stored last to first
  kStridedLast,  // every other element of a row
};

const char* NameOf(Layout layout);

// A tensor in a buffer of its own; a dense one begins a cache line, as those of
// frameworks do, others wherever memory is. With `broadcast`, dimension i has
// stride 0 where broadcast[i].
Tensor MakeTensor(DType dtype, const Sizes& sizes,
                  Layout layout = Layout::kBhsd,
                  std::array<bool, 4> broadcast = {});

// Tensors [B, heads[t], N, D] packed along the heads of one [B, N, sum of
// heads, D] buffer.
std::vector<Tensor> MakePacked(DType dtype, int64_t batch,
                               const std::vector<int64_t>& heads, int64_t rows,
                               int64_t depth);

// Element by logical index; sizes of 1 do not broadcast. Inline: checks read
// every element of every result.
inline double Get(const ConstTensorView& view, const Sizes& index) {
  int64_t offset = 0;
  for (size_t i = 0; i < 4; ++i) offset += index[i] * view.strides[i];
  return reference::LoadAt(view.data, view.dtype, offset);
}
void Set(const TensorView& view, const Sizes& index, double value);

// Normal numbers, rounded to the dtype.
void FillNormal(const TensorView& view, Random& random, double sigma = 1.0,
                double mean = 0.0);
void Fill(const TensorView& view, double value);

// Copies, rounding to the target's dtype.
void Copy(const ConstTensorView& from, const TensorView& to);

// Calls f(index) for every logical index.
template <class F>
void ForEachIndex(const Sizes& sizes, const F& f) {
  for (int64_t a = 0; a < sizes[0]; ++a)
    for (int64_t b = 0; b < sizes[1]; ++b)
      for (int64_t c = 0; c < sizes[2]; ++c)
        for (int64_t d = 0; d < sizes[3]; ++d) f(Sizes{a, b, c, d});
}

// Whether both hold the same bits in every element.
bool SameBits(const ConstTensorView& a, const ConstTensorView& b);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_TENSOR_H_
