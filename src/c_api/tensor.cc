// SPDX-License-Identifier: Apache-2.0
#include "fa2/fa2_c.h"

namespace {

// Sizes whose product overflows are the callee's to refuse, not undefined
// behaviour here.
int64_t Times(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) *
                              static_cast<uint64_t>(b));
}

template <class Tensor, class Data>
Tensor Dense(Data* data, int32_t dtype, int64_t b, int64_t h, int64_t n,
             int64_t d) {
  const int64_t head = Times(n, d);
  return {data, dtype, 0, {b, h, n, d}, {Times(h, head), head, d, 1}};
}

}  // namespace

extern "C" {

fa2_const_tensor fa2_dense_const(const void* data, int32_t dtype, int64_t b,
                                 int64_t h, int64_t n, int64_t d) {
  return Dense<fa2_const_tensor>(data, dtype, b, h, n, d);
}

fa2_tensor fa2_dense(void* data, int32_t dtype, int64_t b, int64_t h, int64_t n,
                     int64_t d) {
  return Dense<fa2_tensor>(data, dtype, b, h, n, d);
}

fa2_const_tensor fa2_dense_rows_const(const void* data, int32_t dtype,
                                      int64_t b, int64_t h, int64_t n) {
  return fa2_dense_const(data, dtype, b, h, n, 1);
}

fa2_tensor fa2_dense_rows(void* data, int32_t dtype, int64_t b, int64_t h,
                          int64_t n) {
  return fa2_dense(data, dtype, b, h, n, 1);
}

}  // extern "C"
