// SPDX-License-Identifier: Apache-2.0

// Attention as handlers of XLA's foreign function interface, so that JAX calls
// it on XLA's own buffers (fa2_cpu/_jax_calls.py). Compiled where jaxlib's
// headers are in the build's environment. A handler runs without Python, on one
// of XLA's threads; the work is done by the default context's.
#include <cstdint>
#include <string>

#include "fa2/attention.h"
#include "fa2/types.h"
#include "python/src/call.h"
#include "xla/ffi/api/ffi.h"

namespace fa2::python {
namespace {

namespace ffi = xla::ffi;

// What an array without elements points to: a view without data means "not
// given".
alignas(64) unsigned char g_no_elements[64];

bool ParseDType(ffi::DataType given, DType* dtype) {
  switch (given) {
    case ffi::DataType::F32:
      return *dtype = DType::kF32, true;
    case ffi::DataType::BF16:
      return *dtype = DType::kBF16, true;
    case ffi::DataType::F16:
      return *dtype = DType::kF16, true;
    case ffi::DataType::F64:
      return *dtype = DType::kF64, true;
    case ffi::DataType::PRED:
      return *dtype = DType::kBool, true;
    default:
      return false;
  }
}

// Views of XLA's dense buffers; the first that does not fit is in error().
class Views {
 public:
  // [B, N, H, D].
  TensorView Tensor(const char* name, const ffi::AnyBuffer& buffer) {
    TensorView view = Take(name, buffer, 4);
    const auto [b, n, h, d] = view.sizes;
    view.sizes = {b, h, n, d};
    view.strides = {n * h * d, d, h * d, 1};
    return view;
  }

  // [B, H, N, N'].
  TensorView Scores(const char* name, const ffi::AnyBuffer& buffer) {
    return Take(name, buffer, 4);
  }

  // [B, H, N].
  TensorView Rows(const char* name, const ffi::AnyBuffer& buffer) {
    return Take(name, buffer, 3);
  }

  const std::string& error() const { return error_; }

 private:
  TensorView Take(const char* name, const ffi::AnyBuffer& buffer, size_t rank) {
    TensorView view;
    const auto dims = buffer.dimensions();
    if (!ParseDType(buffer.element_type(), &view.dtype) ||
        dims.size() != rank) {
      if (error_.empty()) {
        error_ = std::string(name) + " has " + std::to_string(dims.size()) +
                 " dimensions or an element type that fa2 does not take; it "
                 "must have " +
                 std::to_string(rank) + " and be f32, bf16, f16, f64 or bool";
      }
      return view;
    }
    view.sizes = {1, 1, 1, 1};
    for (size_t i = 0; i < rank; ++i) view.sizes[i] = dims[i];
    view.strides = DenseStrides(view.sizes);
    view.data =
        buffer.element_count() == 0 ? g_no_elements : buffer.untyped_data();
    return view;
  }

  std::string error_;
};

AttentionOptions MakeOptions(double scale, bool causal, int64_t window_left,
                             int64_t window_right) {
  AttentionOptions options;
  options.scale = scale;
  options.causal = causal ? Causal::kTopLeft : Causal::kNone;
  options.window_left = window_left;
  options.window_right = window_right;
  return options;
}

ffi::Error ToError(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return ffi::Error::Success();
    case StatusCode::kInvalidArgument:
      return ffi::Error::InvalidArgument(status.message());
    case StatusCode::kUnsupported:
      return ffi::Error(ffi::ErrorCode::kUnimplemented, status.message());
    case StatusCode::kOutOfMemory:
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, status.message());
    case StatusCode::kInternal:
      break;
  }
  return ffi::Error::Internal(status.message());
}

// `bias` holds it, or nothing.
ffi::Error Forward(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::RemainingArgs bias, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::AnyBuffer> lse, double scale, bool causal,
                   int64_t window_left, int64_t window_right) {
  Views views;
  AttentionForwardArgs args;
  args.q = views.Tensor("query", q);
  args.k = views.Tensor("key", k);
  args.v = views.Tensor("value", v);
  args.options = MakeOptions(scale, causal, window_left, window_right);
  if (bias.size() > 0) {
    args.options.bias = views.Scores("bias", *bias.get<ffi::AnyBuffer>(0));
  }
  args.out = views.Tensor("out", *out);
  args.lse = views.Rows("lse", *lse);
  if (!views.error().empty()) {
    return ffi::Error::InvalidArgument(views.error());
  }
  return ToError(AttentionForward(args));
}

// `bias` and `dbias` hold one, or nothing.
ffi::Error Backward(ffi::AnyBuffer dout, ffi::AnyBuffer q, ffi::AnyBuffer k,
                    ffi::AnyBuffer v, ffi::AnyBuffer out, ffi::AnyBuffer lse,
                    ffi::AnyBuffer dlse, ffi::RemainingArgs bias,
                    ffi::Result<ffi::AnyBuffer> dq,
                    ffi::Result<ffi::AnyBuffer> dk,
                    ffi::Result<ffi::AnyBuffer> dv, ffi::RemainingRets dbias,
                    double scale, bool causal, int64_t window_left,
                    int64_t window_right) {
  Views views;
  AttentionBackwardArgs args;
  args.dout = views.Tensor("dout", dout);
  args.q = views.Tensor("query", q);
  args.k = views.Tensor("key", k);
  args.v = views.Tensor("value", v);
  args.out = views.Tensor("out", out);
  args.lse = views.Rows("lse", lse);
  args.dlse = views.Rows("dlse", dlse);
  args.options = MakeOptions(scale, causal, window_left, window_right);
  if (bias.size() > 0) {
    args.options.bias = views.Scores("bias", *bias.get<ffi::AnyBuffer>(0));
  }
  args.dq = views.Tensor("dq", *dq);
  args.dk = views.Tensor("dk", *dk);
  args.dv = views.Tensor("dv", *dv);
  if (dbias.size() > 0) {
    args.dbias = views.Scores("dbias", **dbias.get<ffi::AnyBuffer>(0));
  }
  if (!views.error().empty()) {
    return ffi::Error::InvalidArgument(views.error());
  }
  return ToError(AttentionBackward(args));
}

XLA_FFI_DEFINE_HANDLER(kForward, Forward,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<double>("scale")
                           .Attr<bool>("causal")
                           .Attr<int64_t>("window_left")
                           .Attr<int64_t>("window_right"));

XLA_FFI_DEFINE_HANDLER(kBackward, Backward,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attr<double>("scale")
                           .Attr<bool>("causal")
                           .Attr<int64_t>("window_left")
                           .Attr<int64_t>("window_right"));

}  // namespace

void BindXlaFfi(nanobind::module_& module) {
  module.attr("xla_ffi_version") =
      nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("xla_ffi_attention_forward") =
      nanobind::capsule(reinterpret_cast<void*>(kForward));
  module.attr("xla_ffi_attention_backward") =
      nanobind::capsule(reinterpret_cast<void*>(kBackward));
}

}  // namespace fa2::python
