// SPDX-License-Identifier: Apache-2.0
#include "fa2/compat/metal_attention.h"

#include <cstddef>
#include <string>

#include "fa2/attention.h"
#include "src/c_api/boundary.h"
#include "src/compat/checks.h"

namespace fa2::compat {
namespace {

// Shaders read this block at these offsets.
using Params = fa2_metal_attention_params;
static_assert(sizeof(Params) == 160);
static_assert(offsetof(Params, B) == 0 && offsetof(Params, H) == 4 &&
              offsetof(Params, D) == 8 && offsetof(Params, qL) == 12 &&
              offsetof(Params, kL) == 16 && offsetof(Params, gqa_factor) == 20);
static_assert(offsetof(Params, scale) == 24 &&
              offsetof(Params, softcapping) == 28);
static_assert(offsetof(Params, NQ) == 32 && offsetof(Params, NK) == 36 &&
              offsetof(Params, NQ_aligned) == 40 &&
              offsetof(Params, NK_aligned) == 44 &&
              offsetof(Params, qL_rem) == 48 &&
              offsetof(Params, kL_rem) == 52 &&
              offsetof(Params, qL_off) == 56 && offsetof(Params, pad) == 60);
static_assert(offsetof(Params, Q_strides) == 64 &&
              offsetof(Params, K_strides) == 88 &&
              offsetof(Params, V_strides) == 112 &&
              offsetof(Params, O_strides) == 136);
static_assert(sizeof(fa2_metal_attention_mask_params) == 24);
static_assert(sizeof(fa2_metal_delta_params) == 16);

// The kernel's tile, which its align flags speak of.
constexpr int32_t kTileQueries = 32;
constexpr int32_t kTileKeys = 16;

constexpr uint32_t kAllFlags = FA2_METAL_ALIGN_Q | FA2_METAL_ALIGN_K |
                               FA2_METAL_HAS_MASK | FA2_METAL_DO_CAUSAL;

Status CheckParams(const Params& p, uint32_t flags) {
  const struct {
    const char* name;
    int32_t value;
    int32_t least;
  } extents[] = {
      {"params.B", p.B, 0},   {"params.H", p.H, 0},
      {"params.D", p.D, 0},   {"params.qL", p.qL, 0},
      {"params.kL", p.kL, 0}, {"params.gqa_factor", p.gqa_factor, 1}};
  for (const auto& extent : extents) {
    if (extent.value < extent.least) {
      return Invalid(extent.name, std::to_string(extent.value),
                     std::to_string(extent.least) + " or more");
    }
  }
  if (p.H % p.gqa_factor != 0) {
    return Invalid(
        "params.H", std::to_string(p.H),
        "a multiple of params.gqa_factor, " + std::to_string(p.gqa_factor));
  }
  if (p.softcapping != 0.0f && p.softcapping != 1.0f) {
    return Invalid("params.softcapping", std::to_string(p.softcapping),
                   "0 or 1 (none): this kernel's scores have no softcap");
  }
  if ((flags & ~kAllFlags) != 0) {
    return Invalid(
        "flags", std::to_string(flags),
        "a sum of FA2_METAL_... flags, at most " + std::to_string(kAllFlags));
  }
  if ((flags & FA2_METAL_ALIGN_Q) != 0 && p.qL % kTileQueries != 0) {
    return Invalid("params.qL", std::to_string(p.qL),
                   "a multiple of 32 with FA2_METAL_ALIGN_Q");
  }
  if ((flags & FA2_METAL_ALIGN_K) != 0 && p.kL % kTileKeys != 0) {
    return Invalid("params.kL", std::to_string(p.kL),
                   "a multiple of 16 with FA2_METAL_ALIGN_K");
  }
  return Status::Ok();
}

// A [b, h, n, d] array with the kernel's three strides.
ConstTensorView Strided(const void* data, int64_t b, int64_t h, int64_t n,
                        int64_t d, const int64_t (&strides)[3]) {
  return {data,
          DType::kBF16,
          {b, h, n, d},
          {strides[0], strides[1], strides[2], 1}};
}

struct Pointer {
  const char* name;
  const void* data;
  DType dtype;
  bool empty;
};

template <size_t kCount>
Status CheckPointers(const Pointer (&pointers)[kCount]) {
  for (const Pointer& pointer : pointers) {
    Status status =
        CheckPointer(pointer.name, pointer.data, pointer.dtype, pointer.empty);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status Delta(const void* O, const void* dO, float* Dvec,
             const fa2_metal_delta_params* params, fa2_context* context) {
  if (params == nullptr) return Invalid("params", "NULL", "a parameter block");
  const bool no_rows =
      params->batch == 0 || params->n_q_heads == 0 || params->q_seq_len == 0;
  const bool empty = no_rows || params->head_dim == 0;
  Status status = CheckPointers({{"O", O, DType::kBF16, empty},
                                 {"dO", dO, DType::kBF16, empty},
                                 {"Dvec", Dvec, DType::kF32, no_rows}});
  if (!status.ok()) return status;
  const auto dense = [params](const void* data) {
    return Dense(data, DType::kBF16, params->batch, params->n_q_heads,
                 params->q_seq_len, params->head_dim);
  };
  return AttentionDelta(dense(O), dense(dO),
                        Dense(Dvec, DType::kF32, params->batch,
                              params->n_q_heads, params->q_seq_len),
                        c_api::ToContext(context));
}

}  // namespace
}  // namespace fa2::compat

extern "C" {

fa2_status fa2_metal_attention_backward(
    const void* Q, const void* K, const void* V, const void* dO, const float* L,
    const float* Dvec, const void* mask, float* dQ, float* dK, float* dV,
    const fa2_metal_attention_params* params,
    const fa2_metal_attention_mask_params* mask_params, uint32_t flags,
    fa2_context* context) {
  using fa2::Dense;
  using fa2::DType;
  using fa2::Status;
  namespace compat = fa2::compat;
  return fa2::c_api::Guard("fa2_metal_attention_backward", [&]() -> Status {
    if (params == nullptr)
      return compat::Invalid("params", "NULL", "a parameter block");
    const fa2_metal_attention_params& p = *params;
    Status status = compat::CheckParams(p, flags);
    const bool no_rows = p.B == 0 || p.H == 0 || p.qL == 0;
    const bool no_queries = no_rows || p.D == 0;
    const bool no_keys = p.B == 0 || p.H == 0 || p.kL == 0 || p.D == 0;
    if (status.ok()) {
      status = compat::CheckPointers({{"Q", Q, DType::kBF16, no_queries},
                                      {"K", K, DType::kBF16, no_keys},
                                      {"V", V, DType::kBF16, no_keys},
                                      {"dO", dO, DType::kBF16, no_queries},
                                      {"L", L, DType::kF32, no_rows},
                                      {"Dvec", Dvec, DType::kF32, no_rows},
                                      {"dQ", dQ, DType::kF32, no_queries},
                                      {"dK", dK, DType::kF32, no_keys},
                                      {"dV", dV, DType::kF32, no_keys}});
    }
    if (!status.ok()) return status;

    const int64_t kv_heads = p.H / p.gqa_factor;
    fa2::AttentionBackwardArgs args;
    args.q = compat::Strided(Q, p.B, p.H, p.qL, p.D, p.Q_strides);
    args.k = compat::Strided(K, p.B, kv_heads, p.kL, p.D, p.K_strides);
    args.v = compat::Strided(V, p.B, kv_heads, p.kL, p.D, p.V_strides);
    args.dout = compat::Strided(dO, p.B, p.H, p.qL, p.D, p.O_strides);
    args.lse = Dense(L, DType::kF32, p.B, p.H, p.qL);
    args.delta = Dense(Dvec, DType::kF32, p.B, p.H, p.qL);
    args.dq = Dense(dQ, DType::kF32, p.B, p.H, p.qL, p.D);
    args.dk = Dense(dK, DType::kF32, p.B, kv_heads, p.kL, p.D);
    args.dv = Dense(dV, DType::kF32, p.B, kv_heads, p.kL, p.D);
    args.accumulate_dk = true;
    args.accumulate_dv = true;
    args.options.scale = p.scale;
    if ((flags & FA2_METAL_DO_CAUSAL) != 0)
      args.options.causal = fa2::Causal::kTopLeft;
    if ((flags & FA2_METAL_HAS_MASK) != 0) {
      status = compat::CheckPointer("mask", mask, DType::kBF16,
                                    no_rows || p.kL == 0);
      if (!status.ok()) return status;
      if (mask_params == nullptr) {
        return compat::Invalid("mask_params", "NULL",
                               "given with FA2_METAL_HAS_MASK");
      }
      args.options.bias =
          compat::Strided(mask, p.B, p.H, p.qL, p.kL, mask_params->M_strides);
    }
    return fa2::AttentionBackward(args, fa2::c_api::ToContext(context));
  });
}

fa2_status fa2_metal_attention_delta(const void* O, const void* dO, float* Dvec,
                                     const fa2_metal_delta_params* params,
                                     fa2_context* context) {
  return fa2::c_api::Guard("fa2_metal_attention_delta", [&] {
    return fa2::compat::Delta(O, dO, Dvec, params, context);
  });
}

}  // extern "C"
