// SPDX-License-Identifier: Apache-2.0
#include "bench/onednn/check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include "fa2/attention.h"
#include "fa2/context.h"

namespace fa2::bench {
namespace {

// Of f32 results as long sums of f32 have it, and of bf16 and f16, whose last
// bits are 2^-9 and 2^-12: results, P and dS are each rounded to them.
double Bound(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 1e-2;
    case DType::kF16:
      return 1.5e-3;
    default:
      return 2e-5;
  }
}

double RelativeL2(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = a[i], y = b[i];
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  return std::sqrt(difference / norm);
}

// fa2's arrays, f32.
class Arrays {
 public:
  Arrays(const AttentionCase& c, const TrainingGraph& graph) : case_(c) {
    for (const Role role : {kQ, kK, kV, kDout}) at(role) = graph.Values(role);
    for (const Role role : {kOut, kStats, kDq, kDk, kDv}) {
      const bool key_side = role == kDk || role == kDv;
      at(role).resize(static_cast<size_t>(c.batch * c.heads *
                                          (key_side ? c.keys : c.queries) *
                                          (role == kStats ? 1 : c.head_dim)));
    }
  }

  std::vector<float>& at(Role role) { return values_[role]; }

  TensorView View(Role role) {
    const bool key_side =
        role == kK || role == kV || role == kDk || role == kDv;
    return Dense(at(role).data(), DType::kF32, case_.batch, case_.heads,
                 key_side ? case_.keys : case_.queries,
                 role == kStats ? 1 : case_.head_dim);
  }

 private:
  const AttentionCase& case_;
  std::array<std::vector<float>, kRoles> values_;
};

Status RunFa2(const AttentionCase& c, Arrays* arrays) {
  ContextOptions settings;
  settings.num_threads = c.threads;
  std::unique_ptr<Context> context;
  Status status = Context::Create(settings, &context);
  if (!status.ok()) return status;
  AttentionOptions options;
  options.causal = c.causal ? Causal::kTopLeft : Causal::kNone;
  options.precision = Precision::kExact;
  AttentionForwardArgs forward;
  forward.q = arrays->View(kQ);
  forward.k = arrays->View(kK);
  forward.v = arrays->View(kV);
  forward.out = arrays->View(kOut);
  forward.lse = arrays->View(kStats);
  forward.options = options;
  status = AttentionForward(forward, context.get());
  if (!status.ok()) return status;
  AttentionBackwardArgs backward;
  backward.dout = arrays->View(kDout);
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.out = forward.out;
  backward.lse = forward.lse;
  backward.dq = arrays->View(kDq);
  backward.dk = arrays->View(kDk);
  backward.dv = arrays->View(kDv);
  backward.options = options;
  return AttentionBackward(backward, context.get());
}

}  // namespace

double Difference(const AttentionCase& c, const TrainingGraph& graph,
                  std::string* error) {
  Arrays arrays(c, graph);
  const Status status = RunFa2(c, &arrays);
  if (!status.ok()) {
    *error = status.message();
    return 0;
  }
  const struct {
    Role role;
    const char* name;
  } results[] = {{kOut, "out"},
                 {kStats, "logsumexp"},
                 {kDq, "dq"},
                 {kDk, "dk"},
                 {kDv, "dv"}};
  double largest = 0;
  for (const auto& result : results) {
    if (result.role == kStats && graph.form() == Form::kSoftmax) continue;
    const double apart =
        RelativeL2(graph.Values(result.role), arrays.at(result.role));
    if (!(apart <= Bound(c.dtype))) {
      *error = std::string("oneDNN's ") + result.name +
               " differs from fa2's by " + std::to_string(apart) +
               " of its norm, more than rounding";
      return apart;
    }
    largest = std::max(largest, apart);
  }
  return largest;
}

}  // namespace fa2::bench
