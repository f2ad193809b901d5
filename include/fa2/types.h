// SPDX-License-Identifier: Apache-2.0

// Plain data that every fa2 call is described with: element types and strided
// tensor views.
#ifndef FA2_TYPES_H_
#define FA2_TYPES_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace fa2 {

// Element types. bf16 and f16 are 16-bit storage (uint16_t); kBool is one byte
// per element, 0 = false; kU8 is a byte of eight bits of a mask.
enum class DType : int32_t {
  kF32 = 0,
  kBF16 = 1,
  kF16 = 2,
  kF64 = 3,
  kBool = 4,
  kI32 = 5,
  kI64 = 6,
  kU8 = 7,
};

// Bytes of one element; 0 for a value that is no DType.
constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kBool:
    case DType::kU8:
      return 1;
  }
  return 0;
}

// "f32", "bf16", "f16", "f64", "bool", "i32", "i64", "u8", or
// "unknown".
constexpr const char* NameOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kF64:
      return "f64";
    case DType::kBool:
      return "bool";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
  }
  return "unknown";
}

// A read-only strided array of at most four dimensions. `strides` count
// elements, may be negative or 0. `data` points to element (0,0,0,0); nullptr
// means "not given". Matrices and vectors carry leading sizes of 1; row
// statistics [B, H, N] (lse, dlse, delta) a last size of 1, which the functions
// with three sizes below fill in.
struct ConstTensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::array<int64_t, 4> sizes = {0, 0, 0, 0};
  std::array<int64_t, 4> strides = {0, 0, 0, 0};

  bool given() const { return data != nullptr; }
};

// The same for arrays that a call writes.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::array<int64_t, 4> sizes = {0, 0, 0, 0};
  std::array<int64_t, 4> strides = {0, 0, 0, 0};

  bool given() const { return data != nullptr; }
  // NOLINTNEXTLINE(google-explicit-constructor): a view of the same array
  operator ConstTensorView() const { return {data, dtype, sizes, strides}; }
};

// Strides of a dense array whose last dimension is contiguous.
constexpr std::array<int64_t, 4> DenseStrides(
    const std::array<int64_t, 4>& sizes) {
  return {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
}

// Dense views. For q: (data, dtype, B, Hq, Nq, D).
inline TensorView Dense(void* data, DType dtype, int64_t b, int64_t h,
                        int64_t n, int64_t d) {
  const std::array<int64_t, 4> sizes = {b, h, n, d};
  return {data, dtype, sizes, DenseStrides(sizes)};
}
inline ConstTensorView Dense(const void* data, DType dtype, int64_t b,
                             int64_t h, int64_t n, int64_t d) {
  const std::array<int64_t, 4> sizes = {b, h, n, d};
  return {data, dtype, sizes, DenseStrides(sizes)};
}

// Dense row statistics: (data, dtype, B, Hq, Nq) for lse, dlse and delta; with
// packed sequences (data, dtype, 1, Hq, total_q), or padded (data, dtype,
// sequences, Hq, longest).
inline TensorView Dense(void* data, DType dtype, int64_t b, int64_t h,
                        int64_t n) {
  return Dense(data, dtype, b, h, n, 1);
}
inline ConstTensorView Dense(const void* data, DType dtype, int64_t b,
                             int64_t h, int64_t n) {
  return Dense(data, dtype, b, h, n, 1);
}

// Row statistics with any strides, in elements.
inline TensorView Strided(void* data, DType dtype,
                          const std::array<int64_t, 3>& sizes,
                          const std::array<int64_t, 3>& strides) {
  return {data,
          dtype,
          {sizes[0], sizes[1], sizes[2], 1},
          {strides[0], strides[1], strides[2], 1}};
}
inline ConstTensorView Strided(const void* data, DType dtype,
                               const std::array<int64_t, 3>& sizes,
                               const std::array<int64_t, 3>& strides) {
  return {data,
          dtype,
          {sizes[0], sizes[1], sizes[2], 1},
          {strides[0], strides[1], strides[2], 1}};
}

}  // namespace fa2

#endif  // FA2_TYPES_H_
