// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/optimizer.h"

#include <algorithm>
#include <cmath>

namespace train_gpt {

AdamW::AdamW(const AdamWOptions& options,
             const std::vector<Parameter>& parameters)
    : options_(options) {
  for (const Parameter& p : parameters) {
    m_.emplace_back(p.value.size());
    v_.emplace_back(p.value.size());
  }
}

double AdamW::LearningRate() const {
  const double top = options_.learning_rate;
  if (step_ <= options_.warmup_steps) {
    return top * static_cast<double>(step_) /
           static_cast<double>(options_.warmup_steps);
  }
  const double done =
      std::min(1.0, static_cast<double>(step_ - options_.warmup_steps) /
                        static_cast<double>(std::max<int64_t>(
                            1, options_.steps - options_.warmup_steps)));
  return top * (0.1 + 0.9 * 0.5 * (1 + std::cos(M_PI * done)));
}

void AdamW::Step(std::vector<Parameter>* parameters) {
  ++step_;
  const double rate = LearningRate();
  const auto beta1 = static_cast<float>(options_.beta1);
  const auto beta2 = static_cast<float>(options_.beta2);
  // Both means start at 0; this takes their bias out.
  const double correction1 =
      1 - std::pow(options_.beta1, static_cast<double>(step_));
  const double correction2 =
      1 - std::pow(options_.beta2, static_cast<double>(step_));
  const auto scale = static_cast<float>(rate / correction1);
  const auto scale2 = static_cast<float>(1 / correction2);
  const auto eps = static_cast<float>(options_.eps);
  for (size_t k = 0; k < parameters->size(); ++k) {
    Parameter& p = (*parameters)[k];
    const auto keep = static_cast<float>(
        1 - (p.is_matrix ? rate * options_.weight_decay : 0.0));
    for (size_t i = 0; i < p.value.size(); ++i) {
      const float g = p.gradient[i];
      m_[k][i] = beta1 * m_[k][i] + (1 - beta1) * g;
      v_[k][i] = beta2 * v_[k][i] + (1 - beta2) * g * g;
      p.value[i] = keep * p.value[i] -
                   scale * m_[k][i] / (std::sqrt(scale2 * v_[k][i]) + eps);
    }
  }
}

}  // namespace train_gpt
