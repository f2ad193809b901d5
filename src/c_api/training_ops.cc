// SPDX-License-Identifier: Apache-2.0
#include "fa2/training_ops.h"

#include <string>

#include "src/c_api/boundary.h"
#include "src/c_api/convert.h"

namespace fa2::c_api {
namespace {

Status RmsNormBackward(const fa2_rms_norm_backward_args* given,
                       fa2_context* context) {
  fa2_rms_norm_backward_args from = {};
  Status status = ReadArgs(
      given, offsetof(fa2_rms_norm_backward_args, accumulate_dweight), &from);
  RmsNormBackwardArgs args;
  if (status.ok()) {
    status = ConvertInputs({{"dy", from.dy, &args.dy},
                            {"x", from.x, &args.x},
                            {"weight", from.weight, &args.weight}});
  }
  if (status.ok()) {
    status = ConvertOutputs(
        {{"dx", from.dx, &args.dx}, {"dweight", from.dweight, &args.dweight}});
  }
  if (!status.ok()) return status;
  args.eps = from.eps;
  args.accumulate_dweight = from.accumulate_dweight != 0;
  return fa2::RmsNormBackward(args, ToContext(context));
}

Status RotaryEmbedding(const fa2_rotary_embedding_args* given,
                       fa2_context* context) {
  fa2_rotary_embedding_args from = {};
  Status status =
      ReadArgs(given, offsetof(fa2_rotary_embedding_args, interleaved), &from);
  RotaryEmbeddingArgs args;
  if (status.ok()) {
    status = ConvertInputs({{"x", from.x, &args.x},
                            {"cos", from.cos, &args.cos},
                            {"sin", from.sin, &args.sin}});
  }
  if (status.ok()) status = ConvertOutputs({{"y", from.y, &args.y}});
  if (!status.ok()) return status;
  args.interleaved = from.interleaved != 0;
  return fa2::RotaryEmbedding(args, ToContext(context));
}

Status RotaryEmbeddingBackward(const fa2_rotary_embedding_backward_args* given,
                               fa2_context* context) {
  fa2_rotary_embedding_backward_args from = {};
  Status status = ReadArgs(
      given, offsetof(fa2_rotary_embedding_backward_args, interleaved), &from);
  RotaryEmbeddingBackwardArgs args;
  if (status.ok()) {
    status = ConvertInputs({{"dy", from.dy, &args.dy},
                            {"cos", from.cos, &args.cos},
                            {"sin", from.sin, &args.sin}});
  }
  if (status.ok()) status = ConvertOutputs({{"dx", from.dx, &args.dx}});
  if (!status.ok()) return status;
  args.interleaved = from.interleaved != 0;
  return fa2::RotaryEmbeddingBackward(args, ToContext(context));
}

Status SwiGluBackward(const fa2_swiglu_backward_args* given,
                      fa2_context* context) {
  fa2_swiglu_backward_args from = {};
  Status status = ReadStruct("args", given,
                             offsetof(fa2_swiglu_backward_args, dgate), &from);
  SwiGluBackwardArgs args;
  if (status.ok()) {
    status = ConvertInputs({{"dy", from.dy, &args.dy},
                            {"gate", from.gate, &args.gate},
                            {"up", from.up, &args.up}});
  }
  if (status.ok()) {
    status = ConvertOutputs(
        {{"dgate", from.dgate, &args.dgate}, {"dup", from.dup, &args.dup}});
  }
  if (!status.ok()) return status;
  return fa2::SwiGluBackward(args, ToContext(context));
}

Status EmbeddingBackward(const fa2_embedding_backward_args* given,
                         fa2_context* context) {
  fa2_embedding_backward_args from = {};
  Status status = ReadArgs(
      given, offsetof(fa2_embedding_backward_args, accumulate_dweight), &from);
  EmbeddingBackwardArgs args;
  if (status.ok()) {
    status = ConvertInputs(
        {{"dy", from.dy, &args.dy}, {"ids", from.ids, &args.ids}});
  }
  if (status.ok())
    status = ConvertOutputs({{"dweight", from.dweight, &args.dweight}});
  if (!status.ok()) return status;
  args.accumulate_dweight = from.accumulate_dweight != 0;
  return fa2::EmbeddingBackward(args, ToContext(context));
}

Status CrossEntropy(const fa2_cross_entropy_args* given, fa2_context* context) {
  fa2_cross_entropy_args from = {};
  Status status =
      ReadArgs(given, offsetof(fa2_cross_entropy_args, accumulate_loss), &from);
  CrossEntropyArgs args;
  if (status.ok()) {
    status = ConvertInputs({{"logits", from.logits, &args.logits},
                            {"targets", from.targets, &args.targets},
                            {"weights", from.weights, &args.weights}});
  }
  if (status.ok()) {
    status =
        ConvertOutputs({{"loss", from.loss, &args.loss},
                        {"dlogits", from.dlogits, &args.dlogits},
                        {"losses", from.losses, &args.losses},
                        {"z_loss_part", from.z_loss_part, &args.z_loss_part}});
  }
  if (!status.ok()) return status;
  if (from.has_ignore_index != 0) args.ignore_index = from.ignore_index;
  if (from.has_count != 0) args.count = from.count;
  args.accumulate_loss = from.accumulate_loss != 0;
  args.label_smoothing = from.label_smoothing;
  args.z_loss = from.z_loss;
  return fa2::CrossEntropy(args, ToContext(context));
}

}  // namespace
}  // namespace fa2::c_api

using fa2::ConstTensorView;
using fa2::Status;
using fa2::TensorView;
using fa2::c_api::Convert;
using fa2::c_api::Guard;
using fa2::c_api::ToContext;

extern "C" {

fa2_status fa2_transpose_2d(const fa2_const_tensor* in, const fa2_tensor* out,
                            fa2_context* context) {
  return Guard("fa2_transpose_2d", [&] {
    ConstTensorView from;
    TensorView to;
    Status status = Convert("in", in, &from);
    if (status.ok()) status = Convert("out", out, &to);
    if (!status.ok()) return status;
    return fa2::Transpose2d(from, to, ToContext(context));
  });
}

fa2_status fa2_softmax(const fa2_const_tensor* x, const fa2_tensor* y,
                       fa2_context* context) {
  return Guard("fa2_softmax", [&] {
    ConstTensorView from;
    TensorView to;
    Status status = Convert("x", x, &from);
    if (status.ok()) status = Convert("y", y, &to);
    if (!status.ok()) return status;
    return fa2::Softmax(from, to, ToContext(context));
  });
}

fa2_status fa2_softmax_backward(const fa2_const_tensor* dy,
                                const fa2_const_tensor* y, const fa2_tensor* dx,
                                fa2_context* context) {
  return Guard("fa2_softmax_backward", [&] {
    ConstTensorView gradient, result;
    TensorView to;
    Status status = Convert("dy", dy, &gradient);
    if (status.ok()) status = Convert("y", y, &result);
    if (status.ok()) status = Convert("dx", dx, &to);
    if (!status.ok()) return status;
    return fa2::SoftmaxBackward(gradient, result, to, ToContext(context));
  });
}

fa2_status fa2_rms_norm(const fa2_const_tensor* x,
                        const fa2_const_tensor* weight, double eps,
                        const fa2_tensor* y, fa2_context* context) {
  return Guard("fa2_rms_norm", [&] {
    ConstTensorView from, scale;
    TensorView to;
    Status status = Convert("x", x, &from);
    if (status.ok()) status = Convert("weight", weight, &scale);
    if (status.ok()) status = Convert("y", y, &to);
    if (!status.ok()) return status;
    return fa2::RmsNorm(from, scale, eps, to, ToContext(context));
  });
}

fa2_status fa2_rms_norm_backward(const fa2_rms_norm_backward_args* args,
                                 fa2_context* context) {
  return Guard("fa2_rms_norm_backward",
               [&] { return fa2::c_api::RmsNormBackward(args, context); });
}

fa2_status fa2_rotary_embedding(const fa2_rotary_embedding_args* args,
                                fa2_context* context) {
  return Guard("fa2_rotary_embedding",
               [&] { return fa2::c_api::RotaryEmbedding(args, context); });
}

fa2_status fa2_rotary_embedding_backward(
    const fa2_rotary_embedding_backward_args* args, fa2_context* context) {
  return Guard("fa2_rotary_embedding_backward", [&] {
    return fa2::c_api::RotaryEmbeddingBackward(args, context);
  });
}

fa2_status fa2_swiglu(const fa2_const_tensor* gate, const fa2_const_tensor* up,
                      const fa2_tensor* y, fa2_context* context) {
  return Guard("fa2_swiglu", [&] {
    ConstTensorView from, factor;
    TensorView to;
    Status status = Convert("gate", gate, &from);
    if (status.ok()) status = Convert("up", up, &factor);
    if (status.ok()) status = Convert("y", y, &to);
    if (!status.ok()) return status;
    return fa2::SwiGlu(from, factor, to, ToContext(context));
  });
}

fa2_status fa2_swiglu_backward(const fa2_swiglu_backward_args* args,
                               fa2_context* context) {
  return Guard("fa2_swiglu_backward",
               [&] { return fa2::c_api::SwiGluBackward(args, context); });
}

fa2_status fa2_embedding_backward(const fa2_embedding_backward_args* args,
                                  fa2_context* context) {
  return Guard("fa2_embedding_backward",
               [&] { return fa2::c_api::EmbeddingBackward(args, context); });
}

fa2_status fa2_cross_entropy(const fa2_cross_entropy_args* args,
                             fa2_context* context) {
  return Guard("fa2_cross_entropy",
               [&] { return fa2::c_api::CrossEntropy(args, context); });
}

}  // extern "C"
