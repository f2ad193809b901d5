// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/gradient_check.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <ostream>
#include <random>
#include <vector>

namespace train_gpt {
namespace {

double Norm(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}

// Slope of the loss along `direction` (of length 1) at the parameter's value,
// by differences over +-h and +-2h, whose errors of order h^2 cancel.
double Slope(Model* model, const Batch& batch, Parameter* p,
             const std::vector<float>& direction, double h) {
  const std::vector<float> value = p->value;
  const auto loss_at = [&](double distance) {
    for (size_t i = 0; i < value.size(); ++i) {
      p->value[i] = static_cast<float>(value[i] + distance * direction[i]);
    }
    return model->Loss(batch);
  };
  const double near = (loss_at(h) - loss_at(-h)) / (2 * h);
  const double far = (loss_at(2 * h) - loss_at(-2 * h)) / (4 * h);
  p->value = value;
  return (4 * near - far) / 3;
}

}  // namespace

bool CheckGradients(Model* model, const Batch& batch, std::ostream* log) {
  // The loss is a mean of f32 terms near 6 and good to about 1e-7. A step that
  // changes it by 1e-2 leaves 1e-4 of the slope uncertain.
  constexpr double kChange = 1e-2;
  constexpr double kTolerance = 1e-3;
  constexpr int kDirections = 4;
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  model->LossAndGradients(batch);
  bool all_good = true;
  for (Parameter& p : model->parameters()) {
    const std::vector<float> gradient = p.gradient;
    const double size = Norm(gradient);
    double worst = 0;
    for (int k = 0; k < kDirections; ++k) {
      // The gradient itself, then the gradient and noise of the same length.
      std::vector<float> direction = gradient;
      if (k > 0) {
        const auto noise = static_cast<float>(
            size / std::sqrt(static_cast<double>(gradient.size())));
        for (float& x : direction) x += noise * normal(random);
      }
      const double length = Norm(direction);
      double expected = 0;
      for (size_t i = 0; i < direction.size(); ++i) {
        direction[i] = static_cast<float>(direction[i] / length);
        expected += static_cast<double>(direction[i]) * gradient[i];
      }
      const double slope = Slope(model, batch, &p, direction, kChange / size);
      worst = std::max(worst, std::abs(slope - expected) / size);
    }
    // A NaN is not good.
    const bool good = size > 0 && worst <= kTolerance;
    all_good = all_good && good;
    *log << (good ? "good " : "WRONG") << "  " << std::setw(16) << std::left
         << p.name << std::right << "  |gradient| " << std::scientific
         << std::setprecision(2) << size << "  error " << worst << '\n';
  }
  return all_good;
}

}  // namespace train_gpt
