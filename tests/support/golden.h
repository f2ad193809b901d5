// SPDX-License-Identifier: Apache-2.0

// The outputs of a GPU's memory-efficient attention, tests/data/README.md.
#ifndef FA2_TESTS_SUPPORT_GOLDEN_H_
#define FA2_TESTS_SUPPORT_GOLDEN_H_

#include <string>
#include <vector>

#include "fa2/attention.h"
#include "src/verify/cases/safetensors.h"
#include "tests/support/tensor.h"

namespace fa2::test {

struct Golden {
  std::string name;  // "c00" ...
  std::string what;  // the case in a few words
  DType dtype = DType::kF32;
  ConstTensorView q, k, v, dout;
  ConstTensorView out, lse, dq, dk, dv, dbias;  // the GPU's results
  AttentionOptions options;
  // That kernel's own mistakes, found by comparing with float64: c04 and c05
  // leave the first live block of 64 rows unmasked; c08's backward counts the
  // window from the wrong diagonal.
  bool forward_is_wrong = false;
  bool backward_is_wrong = false;
};

// All cases, in order of their names, with what their views point to.
struct Goldens {
  verify::SafetensorsFile file;
  std::vector<Tensor> prefix_sums;
  std::vector<Golden> cases;
};

Goldens ReadGoldens(const std::string& path);

// Results of one case in tensors of its dtype (lse f32), or all in f64.
struct GoldenResults {
  Tensor out, lse, dq, dk, dv, dbias;
};
GoldenResults MakeResults(const Golden& golden, bool f64);
AttentionForwardArgs ForwardArgs(const Golden& golden,
                                 const GoldenResults& results);
AttentionBackwardArgs BackwardArgs(const Golden& golden,
                                   const GoldenResults& results);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_GOLDEN_H_
