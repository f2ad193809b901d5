// SPDX-License-Identifier: Apache-2.0

// The two loops that take most of the checker's time, for every Highway target.
#ifndef FA2_SRC_VERIFY_MODEL_PRODUCTS_H_
#define FA2_SRC_VERIFY_MODEL_PRODUCTS_H_

#include <cstdint>

namespace fa2::verify {

// A matrix in memory: element (i, j) is data[i * row + j * column].
template <class T>
struct Matrix {
  const T* data = nullptr;
  int64_t row = 0, column = 1;
};

// C[m, n] += A[m, depth] B[depth, n]. Rows of B and C are contiguous; A may be
// a transpose.
template <class T>
struct Product {
  int64_t m = 0, n = 0, depth = 0;
  Matrix<T> a, b;
  T* c = nullptr;
  int64_t c_row = 0;
};

void AddProduct(const Product<float>& product);
void AddProduct(const Product<double>& product);

// to[i] = exp(from[i] - shift); the result is their sum. -inf gives 0.
double ExpRow(const float* from, int64_t count, float shift, float* to);
double ExpRow(const double* from, int64_t count, double shift, double* to);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_PRODUCTS_H_
