// SPDX-License-Identifier: Apache-2.0

// AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with a learning rate
// that warms up and then falls along a cosine.
#ifndef FA2_EXAMPLES_TRAIN_GPT_OPTIMIZER_H_
#define FA2_EXAMPLES_TRAIN_GPT_OPTIMIZER_H_

#include <cstdint>
#include <vector>

#include "examples/train_gpt/model.h"

namespace train_gpt {

struct AdamWOptions {
  double learning_rate = 3e-3;  // the highest
  int64_t warmup_steps = 20;
  int64_t steps = 300;  // the rate has fallen to a tenth by then
  double beta1 = 0.9;
  double beta2 = 0.99;
  double eps = 1e-8;
  double weight_decay = 0.1;  // of matrices
};

class AdamW {
 public:
  AdamW(const AdamWOptions& options, const std::vector<Parameter>& parameters);

  // One step along the gradients of the parameters.
  void Step(std::vector<Parameter>* parameters);

 private:
  double LearningRate() const;

  AdamWOptions options_;
  int64_t step_ = 0;
  std::vector<std::vector<float>> m_, v_;  // means of g and of g^2
};

}  // namespace train_gpt

#endif  // FA2_EXAMPLES_TRAIN_GPT_OPTIMIZER_H_
