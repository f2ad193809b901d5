// SPDX-License-Identifier: Apache-2.0
#include "fa2/compat/dnn_attention.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "fa2/attention.h"
#include "src/c_api/boundary.h"
#include "src/checks/views.h"
#include "src/compat/checks.h"

namespace fa2::compat {
namespace {

using Config = fa2_dnn_flash_attention_config;
static_assert(sizeof(Config) == 28 && offsetof(Config, sm_scale) == 24);
static_assert(sizeof(void*) != 8 || (sizeof(fa2_dnn_tensor) == 32 &&
                                     offsetof(fa2_dnn_tensor, dims) == 16));

// A tensor argument by its name, and as a view once it is checked.
struct Named {
  const char* name;
  const fa2_dnn_tensor* tensor;
  TensorView view = {};
};

Status ToView(Named* argument, int32_t least_rank) {
  const std::string name = argument->name;
  if (argument->tensor == nullptr) return Invalid(name, "NULL", "a tensor");
  const fa2_dnn_tensor& tensor = *argument->tensor;
  if (tensor.rank < least_rank || tensor.rank > 4) {
    return Invalid(name, std::to_string(tensor.rank) + "-D",
                   least_rank == 4 ? "4-D" : "3-D or 4-D");
  }
  if (tensor.dims == nullptr) return Invalid(name + ".dims", "NULL", "given");
  if (tensor.dtype != FA2_F16 && tensor.dtype != FA2_BF16 &&
      tensor.dtype != FA2_F32 && tensor.dtype != FA2_F64) {
    return Invalid(name + ".dtype", std::to_string(tensor.dtype),
                   "FA2_F32 (0), FA2_BF16 (1), FA2_F16 (2) or FA2_F64 (3)");
  }
  TensorView& view = argument->view;
  view.data = tensor.data;
  view.dtype = static_cast<DType>(tensor.dtype);
  // A 3-D logsumexp gets its last dimension of 1.
  view.sizes = {1, 1, 1, 1};
  for (int32_t i = 0; i < tensor.rank; ++i) {
    if (tensor.dims[i] < 0) {
      return Invalid(name + ".dims[" + std::to_string(i) + "]",
                     std::to_string(tensor.dims[i]), "0 or more");
    }
    view.sizes[static_cast<size_t>(i)] = tensor.dims[i];
  }
  view.strides = DenseStrides(view.sizes);
  if (tensor.strides != nullptr) {
    for (int32_t i = 0; i < tensor.rank; ++i)
      view.strides[static_cast<size_t>(i)] = tensor.strides[i];
  }
  const bool empty =
      std::find(view.sizes.begin(), view.sizes.end(), 0) != view.sizes.end();
  return CheckPointer(argument->name, tensor.data, view.dtype, empty);
}

Status CheckSameDims(const Named& a, const Named& b) {
  if (a.view.sizes == b.view.sizes) return Status::Ok();
  return Invalid(std::string("dims of ") + a.name,
                 checks::ShapeText(a.view.sizes),
                 "those of " + std::string(b.name) + ", " +
                     checks::ShapeText(b.view.sizes));
}

// One size of a tensor against the config's.
Status CheckAgainstConfig(const Named& a, size_t dimension,
                          const char* config_name, uint32_t config_value) {
  if (a.view.sizes[dimension] == int64_t{config_value}) return Status::Ok();
  return Invalid(std::string("dims[") + std::to_string(dimension) + "] of " +
                     a.name + " " + checks::ShapeText(a.view.sizes),
                 std::to_string(a.view.sizes[dimension]),
                 std::string(config_name) + " of the config, " +
                     std::to_string(config_value));
}

}  // namespace
}  // namespace fa2::compat

extern "C" fa2_status fa2_dnn_flash_attention_backward(
    const fa2_dnn_flash_attention_config* config, const fa2_dnn_tensor* q,
    const fa2_dnn_tensor* k, const fa2_dnn_tensor* v,
    const fa2_dnn_tensor* output, const fa2_dnn_tensor* d_output,
    const fa2_dnn_tensor* logsumexp, const fa2_dnn_tensor* d_q,
    const fa2_dnn_tensor* d_k, const fa2_dnn_tensor* d_v,
    fa2_context* context) {
  namespace compat = fa2::compat;
  using fa2::Status;
  return fa2::c_api::Guard("fa2_dnn_flash_attention_backward", [&]() -> Status {
    if (config == nullptr) return compat::Invalid("config", "NULL", "given");
    enum { kQ, kK, kV, kO, kDO, kLse, kDQ, kDK, kDV, kCount };
    std::array<compat::Named, kCount> t = {{{"q", q},
                                            {"k", k},
                                            {"v", v},
                                            {"output", output},
                                            {"d_output", d_output},
                                            {"logsumexp", logsumexp},
                                            {"d_q", d_q},
                                            {"d_k", d_k},
                                            {"d_v", d_v}}};
    Status status;
    for (compat::Named& named : t) {
      status = compat::ToView(&named, &named == &t[kLse] ? 3 : 4);
      if (!status.ok()) return status;
    }
    constexpr int kEqual[][2] = {
        {kDQ, kQ}, {kO, kQ}, {kDO, kQ}, {kDK, kK}, {kDV, kV}};
    for (const auto& pair : kEqual) {
      status = compat::CheckSameDims(t[pair[0]], t[pair[1]]);
      if (!status.ok()) return status;
    }
    for (const int tensor : {kQ, kK, kV}) {
      status = compat::CheckAgainstConfig(t[tensor], 3, "head_dim",
                                          config->head_dim);
      if (!status.ok()) return status;
      status = tensor == kQ
                   ? compat::CheckAgainstConfig(t[tensor], 2, "seq_len_q",
                                                config->seq_len_q)
                   : compat::CheckAgainstConfig(t[tensor], 2, "seq_len_kv",
                                                config->seq_len_kv);
      if (!status.ok()) return status;
    }
    fa2::AttentionBackwardArgs args;
    args.q = t[kQ].view;
    args.k = t[kK].view;
    args.v = t[kV].view;
    args.out = t[kO].view;
    args.dout = t[kDO].view;
    args.lse = t[kLse].view;
    args.dq = t[kDQ].view;
    args.dk = t[kDK].view;
    args.dv = t[kDV].view;
    args.options.scale = config->sm_scale;
    if (config->causal != 0) args.options.causal = fa2::Causal::kTopLeft;
    return fa2::AttentionBackward(args, fa2::c_api::ToContext(context));
  });
}
