// SPDX-License-Identifier: Apache-2.0

// Shapes and inputs on which kernels in use were found wrong while their own
// tests passed.
#include <string>
#include <utility>
#include <vector>

#include "src/verify/model/generate.h"

namespace fa2::verify {
namespace {

Case Named(const std::string& name, Case c) {
  c.name = name;
  return c;
}

// One key whose score lies 70 above the others: exp(S) of it overflows where
// the row's maximum is not subtracted.
Case KeyOutlier() {
  GenerateOptions o;
  o.heads = o.kv_heads = 2;
  o.nq = 96;
  o.nk = 160;
  Case c = Generate(o);
  const Array& k = *c.Find("k");
  void* data = nullptr;
  Array copy = MakeArray(k.dtype, k.shape, &data);
  const auto* from = static_cast<const uint16_t*>(k.data);
  auto* to = static_cast<uint16_t*>(data);
  for (int64_t i = 0; i < k.elements(); ++i) to[i] = from[i];
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t d = 0; d < 64; ++d) {
      StoreElement(k.dtype, data, (h * 160 + 101) * 64 + d, 70.0);
    }
  }
  c.tensors["k"] = copy;
  return c;
}

}  // namespace

std::vector<Case> Suite() {
  std::vector<Case> cases;
  GenerateOptions o;
  // dQ wrong at large head dims, with activations' outliers only.
  o.heads = o.kv_heads = 2;
  o.nq = o.nk = 192;
  o.head_dim = o.value_dim = 256;
  o.inputs = Inputs::kOutliers;
  o.options.causal = Causal::kTopLeft;
  cases.push_back(Named("head_dim_256_outliers", Generate(o)));

  cases.push_back(Named("key_outlier_70", KeyOutlier()));

  // [B, N, H, D], whose lse and gradients a kernel may take for dense in heads.
  o = GenerateOptions();
  o.batch = 2;
  o.heads = 6;
  o.kv_heads = 2;
  o.nq = 70;
  o.nk = 130;
  o.options.layout = Layout::kBshd;
  o.options.causal = Causal::kBottomRight;
  cases.push_back(Named("strided_lse", Generate(o)));

  o = GenerateOptions();
  o.head_dim = 96;
  o.value_dim = 64;
  o.nq = 100;
  o.nk = 140;
  cases.push_back(Named("value_dim_differs", Generate(o)));

  // Many tiles of keys that add to one dQ: run it several times and compare
  // with --repeat.
  o = GenerateOptions();
  o.heads = o.kv_heads = 8;
  o.nq = o.nk = 512;
  o.options.causal = Causal::kTopLeft;
  cases.push_back(Named("race_in_dq", Generate(o)));

  // Heads as many as rows: exchanged, the shapes still fit.
  o = GenerateOptions();
  o.heads = o.kv_heads = o.nq = o.nk = 24;
  o.options.layout = Layout::kBshd;
  cases.push_back(Named("sequence_equals_heads", Generate(o)));

  // What a rank of a sequence split over ranks sees: fewer queries than keys,
  // whose diagonal is neither top left nor at a tile's edge.
  o = GenerateOptions();
  o.nq = 61;
  o.nk = 250;
  o.heads = 4;
  o.kv_heads = 2;
  o.options.causal = Causal::kBottomRight;
  cases.push_back(Named("middle_rank", Generate(o)));

  // Dropout, whose mask forward and backward must read alike.
  o = GenerateOptions();
  o.nq = 90;
  o.nk = 110;
  o.options.dropout_p = 0.2;
  o.options.philox_seed = 11;
  cases.push_back(Named("dropout", Generate(o)));

  o = GenerateOptions();
  o.batch = 2;
  o.heads = 6;
  o.kv_heads = 3;
  o.nq = 77;
  o.nk = 131;
  o.head_dim = 40;
  o.value_dim = 24;
  o.inputs = Inputs::kAdversarial;
  o.options.causal = Causal::kBottomRight;
  o.options.window_left = 50;
  cases.push_back(Named("adversarial", Generate(o)));

  o = GenerateOptions();
  o.lengths_q = {40, 1, 65, 17};
  o.lengths_k = {50, 3, 64, 90};
  o.kv_heads = 2;
  o.options.causal = Causal::kBottomRight;
  cases.push_back(Named("packed_sequences", Generate(o)));
  return cases;
}

}  // namespace fa2::verify
