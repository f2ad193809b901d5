// SPDX-License-Identifier: Apache-2.0

// AttentionForward and AttentionBackward of tensors [B, H, N, D] of a framework
// that has OpenMP threads, with no option but a bias or mask, causality, scale
// and precision: a call takes its few arguments from Python in a microsecond.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "fa2/attention.h"
#include "python/src/array.h"
#include "python/src/call.h"
#include "python/src/tensor_exchange.h"

namespace fa2::python {
namespace {

AttentionOptions OptionsOf(nb::handle bias, bool causal,
                           std::optional<double> scale,
                           const std::string& precision) {
  AttentionOptions options;
  options.bias = InputArray::OfTensor("bias", bias).Leading();
  options.causal = causal ? Causal::kTopLeft : Causal::kNone;
  options.scale = scale;
  options.precision = ParsePrecision(precision);
  return options;
}

// Of arguments that are tensors, or descriptors of them (array.h).
ConstTensorView Read(const InputArray& array) {
  return array.Tensor(Layout::kBHSD);
}

void Forward(nb::handle q, nb::handle k, nb::handle v, nb::handle bias,
             nb::handle out, nb::handle lse, bool causal,
             std::optional<double> scale, const std::string& precision,
             std::optional<int> num_threads) {
  AttentionForwardArgs args;
  args.q = Read(InputArray::OfTensor("q", q));
  args.k = Read(InputArray::OfTensor("k", k));
  args.v = Read(InputArray::OfTensor("v", v));
  args.out = OutputArray::OfTensor("out", out).Tensor(Layout::kBHSD);
  args.lse = OutputArray::OfTensor("lse", lse).RowValues(Layout::kBHSD);
  args.options = OptionsOf(bias, causal, scale, precision);
  Context* const context = ContextFor(num_threads, "openmp");
  RunWithoutGil([&] { return AttentionForward(args, context); });
}

void Backward(nb::handle dout, nb::handle q, nb::handle k, nb::handle v,
              nb::handle bias, nb::handle out, nb::handle lse, nb::handle dq,
              nb::handle dk, nb::handle dv, bool causal,
              std::optional<double> scale, const std::string& precision,
              std::optional<int> num_threads) {
  AttentionBackwardArgs args;
  args.dout = Read(InputArray::OfTensor("dout", dout));
  args.q = Read(InputArray::OfTensor("q", q));
  args.k = Read(InputArray::OfTensor("k", k));
  args.v = Read(InputArray::OfTensor("v", v));
  args.out = Read(InputArray::OfTensor("out", out));
  args.lse = InputArray::OfTensor("lse", lse).RowValues(Layout::kBHSD);
  args.dq = OutputArray::OfTensor("dq", dq).Tensor(Layout::kBHSD);
  args.dk = OutputArray::OfTensor("dk", dk).Tensor(Layout::kBHSD);
  args.dv = OutputArray::OfTensor("dv", dv).Tensor(Layout::kBHSD);
  args.options = OptionsOf(bias, causal, scale, precision);
  Context* const context = ContextFor(num_threads, "openmp");
  RunWithoutGil([&] { return AttentionBackward(args, context); });
}

}  // namespace

void BindPlainAttention(nb::module_& module) {
  using namespace nb::literals;  // NOLINT: the argument names
  module.def("use_tensor_exchange", &UseTensorExchange, "tensor_type"_a,
             "Whether plain_attention_* take tensors of this type; they take "
             "descriptors always.");
  module.def("plain_attention_forward", &Forward, "q"_a, "k"_a, "v"_a,
             "bias"_a.none(), "out"_a, "lse"_a.none(), "causal"_a,
             "scale"_a.none(), "precision"_a, "num_threads"_a.none(),
             "Writes out and lse.");
  module.def("plain_attention_backward", &Backward, "dout"_a, "q"_a, "k"_a,
             "v"_a, "bias"_a.none(), "out"_a, "lse"_a, "dq"_a.none(),
             "dk"_a.none(), "dv"_a.none(), "causal"_a, "scale"_a.none(),
             "precision"_a, "num_threads"_a.none(),
             "Writes the gradients that are not None.");
}

}  // namespace fa2::python
