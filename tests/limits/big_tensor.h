// SPDX-License-Identifier: Apache-2.0

// Tensors in mapped memory: large ones, and small ones whose elements lie
// billions apart, of which only the pages that are touched exist.
#ifndef FA2_TESTS_LIMITS_BIG_TENSOR_H_
#define FA2_TESTS_LIMITS_BIG_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tests/support/tensor.h"

namespace fa2::test {

// Zeros, without a promise of memory (MAP_NORESERVE).
class Mapping {
 public:
  // Throws std::bad_alloc where so many addresses cannot be had.
  explicit Mapping(size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
  size_t bytes_;
};

// A tensor whose memory lives as long as it does; its Tensor has no Buffer.
struct BigTensor {
  std::shared_ptr<Mapping> mapping;
  Tensor tensor;

  const TensorView& view() const { return tensor.view; }
};

// Dense.
BigTensor MakeBig(DType dtype, const Sizes& sizes);

// The strides may be negative; they are in elements.
BigTensor MakeFar(DType dtype, const Sizes& sizes, const Sizes& strides);

// About normal numbers of deviation `sigma` that follow from seed and index, by
// all cores.
void FillFast(const BigTensor& tensor, uint64_t seed, double sigma = 1.0);

}  // namespace fa2::test

#endif  // FA2_TESTS_LIMITS_BIG_TENSOR_H_
