// SPDX-License-Identifier: Apache-2.0

// The two loops that take most of the checker's time, for every Highway target.
#ifndef FA2_SRC_VERIFY_PRODUCTS_H_
#define FA2_SRC_VERIFY_PRODUCTS_H_

#include <cstdint>

namespace fa2::verify {

// C[m, n] += A[m, depth] B[depth, n], rows of B and C contiguous. Element (i,
// p) of A is a[i * a_row + p * a_column], so that A may be a transpose.
template <class T>
struct Product {
  int64_t m = 0, n = 0, depth = 0;
  const T* a = nullptr;
  int64_t a_row = 0, a_column = 1;
  const T* b = nullptr;
  int64_t b_row = 0;
  T* c = nullptr;
  int64_t c_row = 0;
};

void AddProduct(const Product<float>& product);
void AddProduct(const Product<double>& product);

// to[i] = exp(from[i] - shift); the result is their sum. -inf gives 0.
double ExpRow(const float* from, int64_t count, float shift, float* to);
double ExpRow(const double* from, int64_t count, double shift, double* to);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_PRODUCTS_H_
