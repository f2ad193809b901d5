// The training kernels of fa2/training_ops.h over arrays that the Python side
// allocated; sums overwrite what those held.
#include "fa2/training_ops.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "python/src/array.h"
#include "python/src/call.h"

namespace fa2::python {
namespace {

void BoundTranspose2d(nb::handle x, nb::handle y) {
  const InputArray x_array("x", x);
  const OutputArray y_array("y", y);
  Context* const context = ContextFor(std::nullopt);
  RunWithoutGil([&] {
    return Transpose2d(x_array.Leading(), y_array.Leading(), context);
  });
}

void BoundSoftmax(nb::handle x, nb::handle y) {
  const InputArray x_array("x", x);
  const OutputArray y_array("y", y);
  Context* const context = ContextFor(std::nullopt);
  RunWithoutGil(
      [&] { return Softmax(x_array.Leading(), y_array.Leading(), context); });
}

void BoundSoftmaxBackward(nb::handle dy, nb::handle y, nb::handle dx) {
  const InputArray dy_array("dy", dy), y_array("y", y);
  const OutputArray dx_array("dx", dx);
  Context* const context = ContextFor(std::nullopt);
  RunWithoutGil([&] {
    return SoftmaxBackward(dy_array.Leading(), y_array.Leading(),
                           dx_array.Leading(), context);
  });
}

void BoundRmsNorm(nb::handle x, nb::handle weight, double eps, nb::handle y) {
  const InputArray x_array("x", x), weight_array("weight", weight);
  const OutputArray y_array("y", y);
  const ConstTensorView weight_view = weight_array.Vector();
  Context* const context = ContextFor(std::nullopt);
  RunWithoutGil([&] {
    return RmsNorm(x_array.Leading(), weight_view, eps, y_array.Leading(),
                   context);
  });
}

void BoundRmsNormBackward(nb::handle dy, nb::handle x, nb::handle weight,
                          double eps, nb::handle dx, nb::handle dweight) {
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
  args.accumulate_dweight = false;
  Context* const context = ContextFor(std::nullopt);
  RunWithoutGil([&] { return RmsNormBackward(args, context); });
}

void BoundEmbeddingBackward(nb::handle dy, nb::handle ids, nb::handle dweight) {
  const InputArray dy_array("dy", dy), ids_array("ids", ids);
  const OutputArray dweight_array("dweight", dweight);
  EmbeddingBackwardArgs args;
  args.dy = dy_array.Leading();
  args.ids = ids_array.Vector();
  args.dweight = dweight_array.Leading();
  args.accumulate_dweight = false;
  Context* const context = ContextFor(std::nullopt);
  RunWithoutGil([&] { return EmbeddingBackward(args, context); });
}

void BoundCrossEntropy(nb::handle logits, nb::handle targets,
                       int64_t ignore_index, nb::handle loss,
                       nb::handle dlogits) {
  const InputArray logits_array("logits", logits),
      targets_array("targets", targets);
  const OutputArray loss_array("loss", loss), dlogits_array("dlogits", dlogits);
  CrossEntropyArgs args;
  args.logits = logits_array.Leading();
  args.targets = targets_array.Vector();
  args.ignore_index = ignore_index;
  args.loss = loss_array.Vector();
  args.accumulate_loss = false;
  args.dlogits = dlogits_array.Leading();
  Context* const context = ContextFor(std::nullopt);
  RunWithoutGil([&] { return CrossEntropy(args, context); });
}

void BoundCausalAttentionBackward(nb::handle dout, nb::handle q, nb::handle k,
                                  nb::handle v, int64_t num_heads,
                                  int64_t num_kv_heads, nb::handle dq,
                                  nb::handle dk, nb::handle dv) {
  const InputArray dout_array("dout", dout), q_array("q", q), k_array("k", k),
      v_array("v", v);
  const OutputArray dq_array("dq", dq), dk_array("dk", dk), dv_array("dv", dv);
  CausalAttentionBackwardArgs args;
  args.num_heads = num_heads;
  args.num_kv_heads = num_kv_heads;
  args.dout = dout_array.Leading();
  args.q = q_array.Leading();
  args.k = k_array.Leading();
  args.v = v_array.Leading();
  args.dq = dq_array.Leading();
  args.dk = dk_array.Leading();
  args.dv = dv_array.Leading();
  args.accumulate_dk = false;
  args.accumulate_dv = false;
  Context* const context = ContextFor(std::nullopt);
  RunWithoutGil([&] { return CausalAttentionBackward(args, context); });
}

}  // namespace

void BindTrainingOps(nb::module_& module) {
  using namespace nb::literals;  // NOLINT: the argument names
  module.def("transpose_2d", &BoundTranspose2d, "x"_a, "y"_a);
  module.def("softmax", &BoundSoftmax, "x"_a, "y"_a);
  module.def("softmax_backward", &BoundSoftmaxBackward, "dy"_a, "y"_a, "dx"_a);
  module.def("rms_norm", &BoundRmsNorm, "x"_a, "weight"_a, "eps"_a, "y"_a);
  module.def("rms_norm_backward", &BoundRmsNormBackward, "dy"_a, "x"_a,
             "weight"_a, "eps"_a, "dx"_a, "dweight"_a);
  module.def("embedding_backward", &BoundEmbeddingBackward, "dy"_a, "ids"_a,
             "dweight"_a);
  module.def("cross_entropy", &BoundCrossEntropy, "logits"_a, "targets"_a,
             "ignore_index"_a, "loss"_a, "dlogits"_a);
  module.def("causal_attention_backward", &BoundCausalAttentionBackward,
             "dout"_a, "q"_a, "k"_a, "v"_a, "num_heads"_a, "num_kv_heads"_a,
             "dq"_a, "dk"_a, "dv"_a);
}

}  // namespace fa2::python
