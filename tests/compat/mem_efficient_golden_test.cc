// SPDX-License-Identifier: Apache-2.0

// The outputs of the memory-efficient attention backward on a GPU,
// through the entry point of that kernel.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fa2/compat/mem_efficient_attention.h"
#include "tests/compat/expect.h"
#include "tests/support/golden.h"

namespace fa2::test {
namespace {

void CopyStrides(const ConstTensorView& view, int64_t (&strides)[3]) {
  strides[0] = view.strides[0];
  strides[1] = view.strides[2];
  strides[2] = view.strides[1];
}

fa2_mem_efficient_backward_params ParamsOf(const Golden& golden,
                                           const ConstTensorView& out,
                                           const ConstTensorView& lse,
                                           const GoldenResults& results) {
  fa2_mem_efficient_backward_params p = {};
  const AttentionOptions& options = golden.options;
  p.struct_size = sizeof(p);
  p.query = golden.q.data;
  p.key = golden.k.data;
  p.value = golden.v.data;
  p.grad_output = golden.dout.data;
  p.output = out.data;
  p.logsumexp = static_cast<const float*>(lse.data);
  p.bias = options.bias.data;
  p.cu_seqlens_q = static_cast<const int32_t*>(options.cu_seqlens_q.data);
  p.cu_seqlens_k = static_cast<const int32_t*>(options.cu_seqlens_k.data);
  p.grad_query = results.dq.view.data;
  p.grad_key = results.dk.view.data;
  p.grad_value = results.dv.view.data;
  p.grad_bias = results.dbias.view.data;
  p.dtype = static_cast<int32_t>(golden.dtype);
  p.scale = static_cast<float>(options.scale.value_or(
      1.0 / std::sqrt(static_cast<double>(golden.q.sizes[3]))));
  p.num_heads = static_cast<int32_t>(golden.q.sizes[1]);
  p.head_dim = static_cast<int32_t>(golden.q.sizes[3]);
  p.head_dim_value = static_cast<int32_t>(golden.v.sizes[3]);
  p.num_batches = static_cast<int32_t>(golden.q.sizes[0]);
  p.num_queries = static_cast<int32_t>(golden.q.sizes[2]);
  p.num_keys = static_cast<int32_t>(golden.k.sizes[2]);
  if (p.cu_seqlens_q != nullptr) {
    p.num_batches = static_cast<int32_t>(options.cu_seqlens_q.sizes[3] - 1);
    p.num_queries = p.num_keys = 0;
    for (int32_t b = 0; b < p.num_batches; ++b) {
      p.num_queries =
          std::max(p.num_queries, p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b]);
      p.num_keys =
          std::max(p.num_keys, p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b]);
    }
  }
  p.custom_mask_type = static_cast<int32_t>(options.causal);
  p.window_size = static_cast<int32_t>(options.window_left + 1);
  p.num_splits_key = 1;
  p.dropout_prob = static_cast<float>(options.dropout_p);
  p.rng_seed = options.philox_seed;
  p.rng_offset = options.philox_offset;
  CopyStrides(golden.q, p.q_strides);
  CopyStrides(golden.k, p.k_strides);
  CopyStrides(golden.v, p.v_strides);
  CopyStrides(golden.dout, p.gO_strides);
  CopyStrides(out, p.o_strides);
  CopyStrides(results.dq.view, p.gQ_strides);
  CopyStrides(results.dk.view, p.gK_strides);
  CopyStrides(results.dv.view, p.gV_strides);
  for (size_t i = 0; i < 3; ++i) {
    p.bias_strides[i] = options.bias.strides[i];
    p.gB_strides[i] = results.dbias.view.strides[i];
  }
  p.lse_strides[0] = lse.strides[0];
  p.lse_strides[1] = lse.strides[1];
  return p;
}

// Of the queries only: the padding of packed sequences means nothing.
double LseError(const Golden& golden, const ConstTensorView& lse,
                const ConstTensorView& truth) {
  const auto* cu =
      static_cast<const int32_t*>(golden.options.cu_seqlens_q.data);
  double worst = 0.0;
  ForEachIndex(lse.sizes, [&](const Sizes& at) {
    if (cu != nullptr && at[2] >= cu[at[0] + 1] - cu[at[0]]) return;
    if (Get(lse, at) == Get(truth, at)) return;
    worst = std::max(worst, std::abs(Get(lse, at) - Get(truth, at)));
  });
  return worst;
}

TEST(MemEfficientGolden, NoWorseThanTheGpu) {
  Goldens goldens = ReadGoldens(FA2_TEST_DATA "/memeff_goldens.safetensors");
  ASSERT_EQ(goldens.cases.size(), 19u);
  for (const Golden& golden : goldens.cases) {
    SCOPED_TRACE(golden.name + " " + golden.what);
    const GoldenResults truth = MakeResults(golden, /*f64=*/true);
    ASSERT_TRUE(AttentionReferenceForward(ForwardArgs(golden, truth)).ok());
    ASSERT_TRUE(AttentionReferenceBackward(BackwardArgs(golden, truth)).ok());

    // The GPU's own out and lse, but for the two cases where they are wrong.
    const GoldenResults results = MakeResults(golden, /*f64=*/false);
    ConstTensorView out = golden.out;
    ConstTensorView lse = golden.lse;
    if (golden.forward_is_wrong) {
      Copy(truth.out.view, results.out.view);
      Copy(truth.lse.view, results.lse.view);
      out = results.out.view;
      lse = results.lse.view;
    }
    const fa2_mem_efficient_backward_params params =
        ParamsOf(golden, out, lse, results);
    ASSERT_EQ(fa2_mem_efficient_attention_backward(&params, nullptr), FA2_OK)
        << fa2_last_error();

    // An error of the lse that is given is one of P, relative to it.
    const double lse_error = LseError(golden, lse, truth.lse.view);
    struct Gradient {
      const char* name;
      ConstTensorView fa2, gpu, truth;
    };
    std::vector<Gradient> gradients = {
        {"grad_query", results.dq.view, golden.dq, truth.dq.view},
        {"grad_key", results.dk.view, golden.dk, truth.dk.view},
        {"grad_value", results.dv.view, golden.dv, truth.dv.view}};
    if (golden.dbias.given()) {
      gradients.push_back(
          {"grad_bias", results.dbias.view, golden.dbias, truth.dbias.view});
    }
    for (const Gradient& gradient : gradients) {
      const Error error = ErrorOf(gradient.fa2, gradient.truth);
      const Error gpu = ErrorOf(gradient.gpu, gradient.truth);
      const std::string numbers = std::string(gradient.name) + ": fa2 " +
                                  std::to_string(error.relative_l2()) +
                                  ", GPU " + std::to_string(gpu.relative_l2());
      if (golden.name == "c19" && gradient.truth.data != truth.dv.view.data) {
        // One query, one key: 0 but for rounding.
        EXPECT_LE(error.max_abs, 1e-6) << numbers;
        continue;
      }
      // f32: what fa2 promises; the GPU's products may be more exact than it
      // had to be.
      double most = golden.backward_is_wrong ? Bound(golden.dtype, golden.dtype)
                                             : gpu.relative_l2();
      if (golden.dtype == DType::kF32)
        most = std::max(most, Bound(golden.dtype, golden.dtype));
      most += lse_error;
      EXPECT_LE(error.relative_l2(), most) << numbers;
    }
  }
}

}  // namespace
}  // namespace fa2::test
