// SPDX-License-Identifier: Apache-2.0

// One call of the memory-efficient attention backward with all its buffers.
#ifndef FA2_TESTS_COMPAT_MEM_EFFICIENT_CASE_H_
#define FA2_TESTS_COMPAT_MEM_EFFICIENT_CASE_H_

#include <string>
#include <vector>

#include "fa2/compat/mem_efficient_attention.h"
#include "tests/compat/expect.h"

namespace fa2::test {

struct MemEfficientCase {
  DType dtype = DType::kF32;
  int32_t batch = 1, queries = 1, keys = 1, heads = 1;
  int32_t dim = 32, value_dim = 32;
  int32_t mask_type = 0;
  int32_t window = 0;
  bool bias = false;
  float dropout = 0.0f;
  // Lengths of packed sequences; batch, queries and keys follow from them.
  std::vector<int32_t> lengths_q, lengths_k;
  // dQ, dK and dV as slices of one [B, M, 3, H, K] buffer.
  bool packed_gradients = false;
};

struct MemEfficientCall {
  fa2_mem_efficient_backward_params params = {};
  // Inputs and outputs, [B, H, M, K] views of [B, M, H, K] arrays.
  Tensor q, k, v, dout, out, bias;
  Tensor lse;  // with strides of its own
  Tensor dq, dk, dv, dbias;
  std::vector<int32_t> cu_q, cu_k;
  Truth truth;

  fa2_status Run() const {
    return fa2_mem_efficient_attention_backward(&params, nullptr);
  }
};

// With the expected gradients. grad_bias and the others start as NaN.
MemEfficientCall MakeMemEfficientCall(const MemEfficientCase& c);

// The gradients are the oracle's.
void ExpectMemEfficientGradients(const MemEfficientCase& c,
                                 const MemEfficientCall& call);

}  // namespace fa2::test

#endif  // FA2_TESTS_COMPAT_MEM_EFFICIENT_CASE_H_
