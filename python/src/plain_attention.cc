// SPDX-License-Identifier: Apache-2.0

// AttentionForward and AttentionBackward of tensors [B, H, N, D] of a framework
// that has OpenMP threads, with no option but a bias or mask, causality, scale
// and precision: a call takes its few arguments from Python in a microsecond.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 ||
         dtype == DType::kF16 || dtype == DType::kF64;
}

// Whether a mask or bias is broadcast to [batch, heads, Nq, Nk].
bool MaskFits(nb::handle object, int64_t batch, int64_t heads) {
  const std::optional<InputArray> mask =
      InputArray::IfTensor("attn_mask", object);
  if (!mask.has_value() ||
      !(mask->dtype() == DType::kBool || IsFloat(mask->dtype()))) {
    return false;
  }
  const std::vector<int64_t>& shape = mask->shape();
  const size_t rank = shape.size();
  const auto broadcast = [](int64_t size, int64_t to) {
    return size == 1 || size == to;
  };
  return rank >= 1 && rank <= 4 &&
         (rank < 4 || broadcast(shape[rank - 4], batch)) &&
         (rank < 3 || broadcast(shape[rank - 3], heads));
}

// How the tensors of a call fit the functions below.
enum Fit {
  kNoFit,
  kFits,
  kFitsOutAsQuery,  // and out is a contiguous tensor of query's shape, as query
};

int FitOf(nb::handle query, nb::handle key, nb::handle value, nb::handle mask,
          bool enable_gqa) {
  const std::optional<InputArray> q = InputArray::IfTensor("query", query);
  const std::optional<InputArray> k = InputArray::IfTensor("key", key);
  const std::optional<InputArray> v = InputArray::IfTensor("value", value);
  if (!q.has_value() || !k.has_value() || !v.has_value()) return kNoFit;
  if (q->shape().size() != 4 || k->shape().size() != 4 ||
      v->shape().size() != 4 || !IsFloat(q->dtype()) ||
      k->dtype() != q->dtype() || v->dtype() != q->dtype()) {
    return kNoFit;
  }
  const int64_t batch = q->shape()[0], heads = q->shape()[1];
  const int64_t kv_heads = k->shape()[1];
  if (k->shape()[0] != batch || v->shape()[0] != batch ||
      v->shape()[1] != kv_heads || !(heads == kv_heads || enable_gqa) ||
      !(mask.is_none() || MaskFits(mask, batch, heads))) {
    return kNoFit;
  }
  const bool one_depth = v->shape()[3] == q->shape()[3];
  return one_depth && q->contiguous() ? kFitsOutAsQuery : kFits;
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
             "parameter_type"_a,
             "Whether plain_attention_* take tensors of these types; they take "
             "descriptors always.");
  module.def("plain_attention_fit", &FitOf, "query"_a.none(), "key"_a.none(),
             "value"_a.none(), "attn_mask"_a.none(), "enable_gqa"_a,
             "0 unless these are tensors on the CPU that plain_attention_* "
             "take: [B, H, N, D] of one float dtype, a mask of bool or float "
             "that is broadcast to [B, H, Nq, Nk]. 2 where out is contiguous "
             "and has query's shape, else 1.");
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
