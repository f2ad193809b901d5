// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>
#include <vector>

#include "tests/support/op_case.h"

namespace fa2::test {
namespace {

// Half the distance between `value` and its neighbour in the dtype, and a
// little more; what a vector unit may flush to zero.
double Rounding(DType dtype, double value) {
  const double size = std::abs(value) * (1.0 + 1e-6);
  switch (dtype) {
    case DType::kF64:
      return size * 0x1p-53 + 1e-300;
    case DType::kBF16:
      return size * 0x1p-8 + 1e-37;
    case DType::kF16:
      return size * 0x1p-11 + 0x1p-25;
    default:
      return size * 0x1p-24 + 1e-37;
  }
}

std::string WorstElement(const OpOutput& o) {
  std::string failure;
  double worst = 1.0;
  ForEachIndex(o.actual.view.sizes, [&](const Sizes& at) {
    const double want = Get(o.value.view, at), got = Get(o.actual.view, at);
    const double bound = Get(o.bound.view, at);
    const double allowed =
        bound + Rounding(o.actual.view.dtype, std::abs(want) + bound);
    const double excess = std::abs(got - want) / allowed;
    if (excess <= worst) return;
    if (!std::isnan(excess)) worst = excess;
    failure = o.name + " at " + Text(at) + " of " + Text(o.actual.view.sizes) +
              " is " + std::to_string(got) + ", must be " +
              std::to_string(want) + "; its error is " +
              std::to_string(excess) + " of the bound";
  });
  return failure;
}

}  // namespace

std::vector<std::string> CheckOp(const OpCase& c,
                                 const std::vector<Context*>& contexts) {
  std::vector<std::string> failures;
  for (const Tensor& t : c.inputs) {
    t.buffer->Snapshot();
    t.buffer->ForbidWriting();
  }
  for (const OpOutput& o : c.outputs) o.actual.buffer->Snapshot();
  std::vector<std::vector<uint8_t>> first;
  for (size_t n = 0; n < contexts.size() && failures.empty(); ++n) {
    for (const OpOutput& o : c.outputs) o.actual.buffer->Restore();
    const Status status = c.run(contexts[n]);
    if (!status.ok()) failures.push_back(status.message());
    for (const Tensor& t : c.inputs) {
      if (t.buffer->ChangedOutside({})) {
        failures.push_back("an input was written");
      }
    }
    for (size_t i = 0; i < c.outputs.size(); ++i) {
      const OpOutput& o = c.outputs[i];
      if (o.actual.buffer->ChangedOutside({o.actual.view})) {
        failures.push_back("memory beside " + o.name + " was written");
      }
      if (n == 0) {
        first.push_back(o.actual.buffer->Contents());
        if (const std::string failure = WorstElement(o); !failure.empty()) {
          failures.push_back(failure);
        }
      } else if (o.actual.buffer->Contents() != first[i]) {
        failures.push_back(o.name + " differs in bits between contexts 0 and " +
                           std::to_string(n));
      }
    }
  }
  for (const OpOutput& o : c.outputs) o.actual.buffer->Restore();
  return failures;
}

}  // namespace fa2::test
