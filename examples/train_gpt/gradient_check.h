// SPDX-License-Identifier: Apache-2.0

// Whether the model's gradients are the slopes of its loss.
#ifndef FA2_EXAMPLES_TRAIN_GPT_GRADIENT_CHECK_H_
#define FA2_EXAMPLES_TRAIN_GPT_GRADIENT_CHECK_H_

#include <iosfwd>

#include "examples/train_gpt/data.h"
#include "examples/train_gpt/model.h"

namespace train_gpt {

// For every parameter, compares the gradient along some directions with finite
// differences of the loss, and prints a line. True if all agree.
bool CheckGradients(Model* model, const Batch& batch, std::ostream* log);

}  // namespace train_gpt

#endif  // FA2_EXAMPLES_TRAIN_GPT_GRADIENT_CHECK_H_
