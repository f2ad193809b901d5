// SPDX-License-Identifier: Apache-2.0
#include "tests/limits/big_tensor.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <thread>
#include <vector>

namespace fa2::test {
namespace {

// SplitMix64 (Steele et al. 2014).
uint64_t Mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Sum of four uniform numbers, of variance 1.
double Normal(uint64_t bits) {
  double sum = 0.0;
  for (int i = 0; i < 64; i += 16) {
    sum += static_cast<double>(bits >> i & 0xFFFF) * 0x1p-16 - 0.5;
  }
  return sum * 1.7320508075688772;
}

}  // namespace

Mapping::Mapping(size_t bytes) : bytes_(std::max<size_t>(bytes, 1)) {
  void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(memory);
}

Mapping::~Mapping() { munmap(data_, bytes_); }

BigTensor MakeBig(DType dtype, const Sizes& sizes) {
  return MakeFar(dtype, sizes, DenseStrides(sizes));
}

BigTensor MakeFar(DType dtype, const Sizes& sizes, const Sizes& strides) {
  int64_t low = 0, high = 1;
  for (size_t i = 0; i < 4; ++i) {
    const int64_t reach = (sizes[i] - 1) * strides[i];
    (reach < 0 ? low : high) += reach;
  }
  const auto bytes = static_cast<int64_t>(SizeOf(dtype));
  BigTensor big;
  big.mapping =
      std::make_shared<Mapping>(static_cast<size_t>((high - low) * bytes));
  big.tensor.view = {big.mapping->data() - low * bytes, dtype, sizes, strides};
  // Else a far element would bring 2 MiB.
  if (strides != DenseStrides(sizes)) {
    (void)madvise(big.mapping->data(),
                  static_cast<size_t>((high - low) * bytes), MADV_NOHUGEPAGE);
  }
  return big;
}

void FillFast(const BigTensor& tensor, uint64_t seed, double sigma) {
  const TensorView& view = tensor.view();
  const int64_t rows = view.sizes[0] * view.sizes[1] * view.sizes[2];
  const int64_t columns = view.sizes[3];
  const auto workers =
      static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  const auto work = [&](int64_t worker) {
    for (int64_t row = rows * worker / workers;
         row < rows * (worker + 1) / workers; ++row) {
      const int64_t n = row % view.sizes[2];
      const int64_t h = row / view.sizes[2] % view.sizes[1];
      const int64_t b = row / view.sizes[2] / view.sizes[1];
      for (int64_t d = 0; d < columns; ++d) {
        const auto index = static_cast<uint64_t>(row * columns + d);
        Set(view, {b, h, n, d}, sigma * Normal(Mixed(seed ^ Mixed(index))));
      }
    }
  };
  std::vector<std::thread> threads;
  for (int64_t w = 0; w < workers; ++w) threads.emplace_back(work, w);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace fa2::test
