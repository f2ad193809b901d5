// SPDX-License-Identifier: Apache-2.0

// Cases to try a kernel on.
#ifndef FA2_SRC_VERIFY_MODEL_GENERATE_H_
#define FA2_SRC_VERIFY_MODEL_GENERATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "src/verify/cases/case.h"

namespace fa2::verify {

// What the inputs are like.
enum class Inputs {
  kGaussian,
  kOutliers,  // a few channels of q and k 50 times larger, as activations have
  kPeaked,    // scores so large that a row of P is nearly one key
  kLongTail,  // Student's t with 3 degrees of freedom
  kAdversarial,  // means and sizes that differ by head, batch and half of the
                 // rows
};

struct GenerateOptions {
  int64_t batch = 1, heads = 4, kv_heads = 4;
  int64_t nq = 128, nk = 128, head_dim = 64, value_dim = 64;
  DType dtype = DType::kBF16;
  Options options;
  Inputs inputs = Inputs::kGaussian;
  uint64_t seed = 0;
  // Sizes of a bias that is added (empty: none), e.g. {1, H, Nq, Nk}.
  std::vector<int64_t> bias;
  bool sinks = false;
  bool alibi = false;
  bool dlse = false;
  bool keep = false;               // dropout's mask as a tensor
  std::vector<int64_t> lengths_q;  // of packed sequences, layout thd
  std::vector<int64_t> lengths_k;
};

// Inputs alone. Throws Error for sizes that do not fit.
Case Generate(const GenerateOptions& options);

// Adds the answer, rounded to the inputs' dtype (lse f32).
void AddAnswers(Case* c, int threads);

// "gaussian", "outliers", "peaked", "long-tail", "adversarial"; throws Error.
Inputs InputsNamed(const std::string& name);

// The cases on which kernels in use were found wrong.
std::vector<Case> Suite();

// A new array, written through the pointer that it gives.
Array MakeArray(DType dtype, const std::vector<int64_t>& shape, void** data);
// Rounds to the array's float dtype.
void StoreElement(DType dtype, void* data, int64_t index, double value);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_GENERATE_H_
