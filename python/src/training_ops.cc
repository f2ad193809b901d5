// SPDX-License-Identifier: Apache-2.0

// The training kernels of fa2/training_ops.h over arrays that the Python side
// allocated.
#include "fa2/training_ops.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>
#include <string>

#include "fa2/compat/causal_attention.h"
#include "python/src/array.h"
#include "python/src/call.h"

namespace fa2::python {
namespace {

// A view for the C interface.
template <class CTensor, class View>
CTensor ToC(const View& view) {
  CTensor tensor = {};
  tensor.data = view.data;
  tensor.dtype = static_cast<int32_t>(view.dtype);
  std::copy(view.sizes.begin(), view.sizes.end(), tensor.sizes);
  std::copy(view.strides.begin(), view.strides.end(), tensor.strides);
  return tensor;
}

void BoundTranspose2d(nb::handle x, nb::handle y,
                      std::optional<int> num_threads,
                      const std::optional<std::string>& pool) {
  const InputArray x_array("x", x);
  const OutputArray y_array("y", y);
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil([&] {
    return Transpose2d(x_array.Leading(), y_array.Leading(), context);
  });
}

void BoundSoftmax(nb::handle x, nb::handle y, std::optional<int> num_threads,
                  const std::optional<std::string>& pool) {
  const InputArray x_array("x", x);
  const OutputArray y_array("y", y);
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil(
      [&] { return Softmax(x_array.Leading(), y_array.Leading(), context); });
}

void BoundSoftmaxBackward(nb::handle dy, nb::handle y, nb::handle dx,
                          std::optional<int> num_threads,
                          const std::optional<std::string>& pool) {
  const InputArray dy_array("dy", dy), y_array("y", y);
  const OutputArray dx_array("dx", dx);
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil([&] {
    return SoftmaxBackward(dy_array.Leading(), y_array.Leading(),
                           dx_array.Leading(), context);
  });
}

void BoundRmsNorm(nb::handle x, nb::handle weight, double eps, nb::handle y,
                  std::optional<int> num_threads,
                  const std::optional<std::string>& pool) {
  const InputArray x_array("x", x), weight_array("weight", weight);
  const OutputArray y_array("y", y);
  const ConstTensorView weight_view = weight_array.Vector();
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil([&] {
    return RmsNorm(x_array.Leading(), weight_view, eps, y_array.Leading(),
                   context);
  });
}

void BoundRmsNormBackward(nb::handle dy, nb::handle x, nb::handle weight,
                          double eps, nb::handle dx, nb::handle dweight,
                          std::optional<int> num_threads,
                          const std::optional<std::string>& pool) {
  const InputArray dy_array("dy", dy), x_array("x", x),
      weight_array("weight", weight);
  const OutputArray dx_array("dx", dx), dweight_array("dweight", dweight);
  RmsNormBackwardArgs args;
  args.dy = dy_array.Leading();
  args.x = x_array.Leading();
  args.weight = weight_array.Vector();
  args.eps = eps;
  args.dx = dx_array.Leading();
  args.dweight = dweight_array.Vector();
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil([&] { return RmsNormBackward(args, context); });
}

void BoundEmbeddingBackward(nb::handle dy, nb::handle ids, nb::handle dweight,
                            std::optional<int> num_threads,
                            const std::optional<std::string>& pool) {
  const InputArray dy_array("dy", dy), ids_array("ids", ids);
  const OutputArray dweight_array("dweight", dweight);
  EmbeddingBackwardArgs args;
  args.dy = dy_array.Leading();
  args.ids = ids_array.Vector();
  args.dweight = dweight_array.Leading();
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil([&] { return EmbeddingBackward(args, context); });
}

void BoundCrossEntropy(nb::handle logits, nb::handle targets,
                       int64_t ignore_index, nb::handle loss,
                       nb::handle dlogits, std::optional<int64_t> count,
                       double label_smoothing, double z_loss,
                       nb::handle weights, nb::handle losses,
                       nb::handle z_loss_part, std::optional<int> num_threads,
                       const std::optional<std::string>& pool) {
  const InputArray logits_array("logits", logits),
      targets_array("targets", targets), weights_array("weights", weights);
  const OutputArray loss_array("loss", loss), dlogits_array("dlogits", dlogits),
      losses_array("losses", losses),
      z_loss_part_array("z_loss_part", z_loss_part);
  CrossEntropyArgs args;
  args.logits = logits_array.Leading();
  args.targets = targets_array.Vector();
  args.ignore_index = ignore_index;
  args.loss = loss_array.Vector();
  args.dlogits = dlogits_array.Leading();
  args.count = count;
  args.label_smoothing = label_smoothing;
  args.z_loss = z_loss;
  args.weights = weights_array.Vector();
  args.losses = losses_array.Vector();
  args.z_loss_part = z_loss_part_array.Vector();
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil([&] { return CrossEntropy(args, context); });
}

// `back`: the gradient.
void BoundRotaryEmbedding(nb::handle x, nb::handle cos, nb::handle sin,
                          bool interleaved, bool back, nb::handle y,
                          std::optional<int> num_threads,
                          const std::optional<std::string>& pool) {
  const InputArray x_array("x", x), cos_array("cos", cos),
      sin_array("sin", sin);
  const OutputArray y_array("y", y);
  RotaryEmbeddingArgs args;
  args.x = x_array.Leading();
  args.cos = cos_array.Leading();
  args.sin = sin_array.Leading();
  args.interleaved = interleaved;
  args.y = y_array.Leading();
  RotaryEmbeddingBackwardArgs back_args;
  back_args.dy = args.x;
  back_args.cos = args.cos;
  back_args.sin = args.sin;
  back_args.interleaved = interleaved;
  back_args.dx = args.y;
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil([&] {
    return back ? RotaryEmbeddingBackward(back_args, context)
                : RotaryEmbedding(args, context);
  });
}

void BoundSwiGlu(nb::handle gate, nb::handle up, nb::handle y,
                 std::optional<int> num_threads,
                 const std::optional<std::string>& pool) {
  const InputArray gate_array("gate", gate), up_array("up", up);
  const OutputArray y_array("y", y);
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil([&] {
    return SwiGlu(gate_array.Leading(), up_array.Leading(), y_array.Leading(),
                  context);
  });
}

void BoundSwiGluBackward(nb::handle dy, nb::handle gate, nb::handle up,
                         nb::handle dgate, nb::handle dup,
                         std::optional<int> num_threads,
                         const std::optional<std::string>& pool) {
  const InputArray dy_array("dy", dy), gate_array("gate", gate),
      up_array("up", up);
  const OutputArray dgate_array("dgate", dgate), dup_array("dup", dup);
  SwiGluBackwardArgs args;
  args.dy = dy_array.Leading();
  args.gate = gate_array.Leading();
  args.up = up_array.Leading();
  args.dgate = dgate_array.Leading();
  args.dup = dup_array.Leading();
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil([&] { return SwiGluBackward(args, context); });
}

void BoundCausalAttentionBackward(nb::handle dout, nb::handle q, nb::handle k,
                                  nb::handle v, int64_t num_heads,
                                  int64_t num_kv_heads, nb::handle dq,
                                  nb::handle dk, nb::handle dv,
                                  std::optional<int> num_threads,
                                  const std::optional<std::string>& pool) {
  const InputArray dout_array("dout", dout), q_array("q", q), k_array("k", k),
      v_array("v", v);
  const OutputArray dq_array("dq", dq), dk_array("dk", dk), dv_array("dv", dv);
  fa2_causal_attention_backward_args args = {};
  args.struct_size = sizeof(args);
  args.num_heads = num_heads;
  args.num_kv_heads = num_kv_heads;
  args.dout = ToC<fa2_const_tensor>(dout_array.Leading());
  args.q = ToC<fa2_const_tensor>(q_array.Leading());
  args.k = ToC<fa2_const_tensor>(k_array.Leading());
  args.v = ToC<fa2_const_tensor>(v_array.Leading());
  args.dq = ToC<fa2_tensor>(dq_array.Leading());
  args.dk = ToC<fa2_tensor>(dk_array.Leading());
  args.dv = ToC<fa2_tensor>(dv_array.Leading());
  Context* const context = ContextFor(num_threads, pool);
  RunWithoutGil([&] { return CausalAttentionBackward(args, context); });
}

}  // namespace

void BindTrainingOps(nb::module_& module) {
  using namespace nb::literals;  // NOLINT: the argument names
  module.def("transpose_2d", &BoundTranspose2d, "x"_a, "y"_a,
             "num_threads"_a = nb::none(), "pool"_a = nb::none());
  module.def("softmax", &BoundSoftmax, "x"_a, "y"_a,
             "num_threads"_a = nb::none(), "pool"_a = nb::none());
  module.def("softmax_backward", &BoundSoftmaxBackward, "dy"_a, "y"_a, "dx"_a,
             "num_threads"_a = nb::none(), "pool"_a = nb::none());
  module.def("rms_norm", &BoundRmsNorm, "x"_a, "weight"_a, "eps"_a, "y"_a,
             "num_threads"_a = nb::none(), "pool"_a = nb::none());
  module.def("rms_norm_backward", &BoundRmsNormBackward, "dy"_a, "x"_a,
             "weight"_a, "eps"_a, "dx"_a.none(), "dweight"_a.none(),
             "num_threads"_a = nb::none(), "pool"_a = nb::none());
  module.def("rotary_embedding", &BoundRotaryEmbedding, "x"_a, "cos"_a, "sin"_a,
             "interleaved"_a, "back"_a, "y"_a, "num_threads"_a = nb::none(),
             "pool"_a = nb::none());
  module.def("swiglu", &BoundSwiGlu, "gate"_a, "up"_a, "y"_a,
             "num_threads"_a = nb::none(), "pool"_a = nb::none());
  module.def("swiglu_backward", &BoundSwiGluBackward, "dy"_a, "gate"_a, "up"_a,
             "dgate"_a.none(), "dup"_a.none(), "num_threads"_a = nb::none(),
             "pool"_a = nb::none());
  module.def("embedding_backward", &BoundEmbeddingBackward, "dy"_a, "ids"_a,
             "dweight"_a, "num_threads"_a = nb::none(), "pool"_a = nb::none());
  module.def("cross_entropy", &BoundCrossEntropy, "logits"_a, "targets"_a,
             "ignore_index"_a, "loss"_a.none(), "dlogits"_a.none(),
             nb::kw_only(), "count"_a = nb::none(), "label_smoothing"_a = 0.0,
             "z_loss"_a = 0.0, "weights"_a = nb::none(),
             "losses"_a = nb::none(), "z_loss_part"_a = nb::none(),
             "num_threads"_a = nb::none(), "pool"_a = nb::none());
  module.def("causal_attention_backward", &BoundCausalAttentionBackward,
             "dout"_a, "q"_a, "k"_a, "v"_a, "num_heads"_a, "num_kv_heads"_a,
             "dq"_a, "dk"_a, "dv"_a, "num_threads"_a = nb::none(),
             "pool"_a = nb::none());
}

}  // namespace fa2::python
