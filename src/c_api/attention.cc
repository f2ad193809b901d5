// SPDX-License-Identifier: Apache-2.0
#include "fa2/attention.h"

#include "fa2/reference.h"
#include "src/c_api/boundary.h"
#include "src/c_api/convert.h"

namespace fa2::c_api {
namespace {

// Converts the arguments and hands them on.
template <class Args, class CArgs, class Call>
fa2_status ConvertAndCall(const char* function, const CArgs* given,
                          const Call& call) {
  return Guard(function, [&] {
    Args args;
    BlockMask block_mask;
    Status status = Convert(given, &block_mask, &args);
    return status.ok() ? call(args) : status;
  });
}

Status NullBytes() {
  return Status::InvalidArgument(
      "bytes is NULL; it must point to the number to fill");
}

}  // namespace
}  // namespace fa2::c_api

using fa2::AttentionBackwardArgs;
using fa2::AttentionForwardArgs;
using fa2::c_api::ConvertAndCall;
using fa2::c_api::Guard;
using fa2::c_api::ToContext;

extern "C" {

fa2_status fa2_attention_forward(const fa2_attention_forward_args* args,
                                 fa2_context* context) {
  return ConvertAndCall<AttentionForwardArgs>(
      "fa2_attention_forward", args, [&](const AttentionForwardArgs& a) {
        return fa2::AttentionForward(a, ToContext(context));
      });
}

fa2_status fa2_attention_backward(const fa2_attention_backward_args* args,
                                  fa2_context* context) {
  return ConvertAndCall<AttentionBackwardArgs>(
      "fa2_attention_backward", args, [&](const AttentionBackwardArgs& a) {
        return fa2::AttentionBackward(a, ToContext(context));
      });
}

fa2_status fa2_attention_forward_workspace(
    const fa2_attention_forward_args* args, size_t* bytes,
    fa2_context* context) {
  return ConvertAndCall<AttentionForwardArgs>(
      "fa2_attention_forward_workspace", args,
      [&](const AttentionForwardArgs& a) {
        if (bytes == nullptr) return fa2::c_api::NullBytes();
        return fa2::AttentionForwardWorkspace(a, bytes, ToContext(context));
      });
}

fa2_status fa2_attention_backward_workspace(
    const fa2_attention_backward_args* args, size_t* bytes,
    fa2_context* context) {
  return ConvertAndCall<AttentionBackwardArgs>(
      "fa2_attention_backward_workspace", args,
      [&](const AttentionBackwardArgs& a) {
        if (bytes == nullptr) return fa2::c_api::NullBytes();
        return fa2::AttentionBackwardWorkspace(a, bytes, ToContext(context));
      });
}

fa2_status fa2_attention_delta(const fa2_const_tensor* out,
                               const fa2_const_tensor* dout,
                               const fa2_tensor* delta, fa2_context* context) {
  return Guard("fa2_attention_delta", [&] {
    fa2::ConstTensorView o, d_o;
    fa2::TensorView d;
    fa2::Status status = fa2::c_api::Convert("out", out, &o);
    if (status.ok()) status = fa2::c_api::Convert("dout", dout, &d_o);
    if (status.ok()) status = fa2::c_api::Convert("delta", delta, &d);
    if (!status.ok()) return status;
    return fa2::AttentionDelta(o, d_o, d, ToContext(context));
  });
}

fa2_status fa2_philox_keep_mask(double dropout_p, uint64_t seed,
                                uint64_t offset, const fa2_tensor* keep,
                                fa2_context* context) {
  return Guard("fa2_philox_keep_mask", [&] {
    fa2::TensorView view;
    fa2::Status status = fa2::c_api::Convert("keep", keep, &view);
    if (!status.ok()) return status;
    return fa2::PhiloxKeepMask(dropout_p, seed, offset, view,
                               ToContext(context));
  });
}

fa2_status fa2_attention_reference_forward(
    const fa2_attention_forward_args* args) {
  return ConvertAndCall<AttentionForwardArgs>(
      "fa2_attention_reference_forward", args, fa2::AttentionReferenceForward);
}

fa2_status fa2_attention_reference_backward(
    const fa2_attention_backward_args* args) {
  return ConvertAndCall<AttentionBackwardArgs>(
      "fa2_attention_reference_backward", args,
      fa2::AttentionReferenceBackward);
}

}  // extern "C"
