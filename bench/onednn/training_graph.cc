// SPDX-License-Identifier: Apache-2.0
#include "bench/onednn/training_graph.h"

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>

#include "src/common/half.h"

namespace fa2::bench {
namespace {

using dnnl::graph::logical_tensor;
using dnnl::graph::op;
using dnnl::graph::tensor;
using Type = logical_tensor::data_type;
using Dims = logical_tensor::dims;

Type TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return Type::bf16;
    case DType::kF16:
      return Type::f16;
    default:
      return Type::f32;
  }
}

// The shapes of a case, and its operations one after another.
class Builder {
 public:
  explicit Builder(const AttentionCase& c)
      : case_(c),
        type_(TypeOf(c.dtype)),
        graph_(dnnl::engine::kind::cpu),
        scores_({c.batch, c.heads, c.queries, c.keys}) {}

  static logical_tensor Strided(size_t id, Type type, const Dims& dims) {
    return {id, type, dims, logical_tensor::layout_type::strided};
  }

  logical_tensor End(Role role) const {
    const int64_t b = case_.batch, h = case_.heads, d = case_.head_dim;
    switch (role) {
      case kK:
      case kV:
      case kDk:
      case kDv:
        return Strided(role, type_, {b, h, case_.keys, d});
      case kScale:
        return Strided(role, Type::f32, {1});
      case kMask:
        return Strided(role, Type::f32, {1, 1, case_.queries, case_.keys});
      case kStats:
        return Strided(role, Type::f32, {b, h, case_.queries, 1});
      default:
        return Strided(role, type_, {b, h, case_.queries, d});
    }
  }

  logical_tensor Scores(Type type) {
    return Strided(next_id_++, type, scores_);
  }
  logical_tensor Scores() { return Scores(Type::f32); }

  op& Add(op::kind kind, std::initializer_list<logical_tensor> inputs,
          std::initializer_list<logical_tensor> outputs) {
    ops_.emplace_back(ops_.size(), kind, inputs, outputs,
                      "op" + std::to_string(ops_.size()));
    return ops_.back();
  }

  void MatMul(const logical_tensor& a, bool transpose_a,
              const logical_tensor& b, bool transpose_b,
              const logical_tensor& result) {
    op& product = Add(op::kind::MatMul, {a, b}, {result});
    product.set_attr<bool>(op::attr::transpose_a, transpose_a);
    product.set_attr<bool>(op::attr::transpose_b, transpose_b);
  }

  // scale * Q K^T, and the mask where there is one.
  logical_tensor ScaledScores() {
    const logical_tensor products = Scores(), scaled = Scores();
    MatMul(End(kQ), false, End(kK), true, products);
    Add(op::kind::Multiply, {products, End(kScale)}, {scaled});
    if (!case_.causal) return scaled;
    const logical_tensor masked = Scores();
    Add(op::kind::Add, {scaled, End(kMask)}, {masked});
    return masked;
  }

  op& Softmax(const logical_tensor& scores, const logical_tensor& result) {
    op& softmax = Add(op::kind::SoftMax, {scores}, {result});
    softmax.set_attr<int64_t>(op::attr::axis, -1);
    return softmax;
  }

  // rowsum(O * dO)
  logical_tensor Delta() {
    const Dims q = End(kQ).get_dims();
    const logical_tensor products = Strided(next_id_++, Type::f32, q);
    const logical_tensor delta =
        Strided(next_id_++, Type::f32, {q[0], q[1], q[2], 1});
    Add(op::kind::Multiply, {End(kOut), End(kDout)}, {products});
    op& sum = Add(op::kind::ReduceSum, {products}, {delta});
    sum.set_attr<std::vector<int64_t>>(op::attr::axes, {-1});
    sum.set_attr<bool>(op::attr::keep_dims, true);
    return delta;
  }

  // The inputs' dtype: a copy only where that is another than f32.
  logical_tensor Narrow(const logical_tensor& scores) {
    if (type_ == Type::f32) return scores;
    const logical_tensor narrow = Scores(type_);
    Add(op::kind::TypeCast, {scores}, {narrow});
    return narrow;
  }

  dnnl::graph::graph Finish() {
    for (const op& each : ops_) graph_.add_op(each);
    graph_.finalize();
    return graph_;
  }

  dnnl::graph::graph Forward(Form form) {
    const logical_tensor probabilities = Scores(type_);
    op& softmax = Softmax(ScaledScores(), probabilities);
    if (form == Form::kPattern) softmax.add_output(End(kStats));
    MatMul(probabilities, false, End(kV), false, End(kOut));
    return Finish();
  }

  dnnl::graph::graph Backward(Form form) {
    const logical_tensor scores = ScaledScores(), probabilities = Scores(),
                         ds = Scores(), scaled = Scores();
    if (form == Form::kPattern) {
      const logical_tensor shifted = Scores();
      Add(op::kind::Subtract, {scores, End(kStats)}, {shifted});
      Add(op::kind::Exp, {shifted}, {probabilities});
    } else {
      Softmax(scores, probabilities);
    }
    MatMul(Narrow(probabilities), true, End(kDout), false, End(kDv));

    const logical_tensor dp = Scores();
    MatMul(End(kDout), false, End(kV), true, dp);
    if (form == Form::kPattern) {
      const logical_tensor centred = Scores();
      Add(op::kind::Subtract, {dp, Delta()}, {centred});
      Add(op::kind::Multiply, {probabilities, centred}, {ds});
    } else {
      op& gradient = Add(op::kind::SoftMaxBackward, {dp, probabilities}, {ds});
      gradient.set_attr<int64_t>(op::attr::axis, -1);
    }
    Add(op::kind::Multiply, {ds, End(kScale)}, {scaled});

    const logical_tensor narrow = Narrow(scaled);
    MatMul(narrow, false, End(kK), false, End(kDq));
    MatMul(narrow, true, End(kQ), false, End(kDk));
    return Finish();
  }

 private:
  const AttentionCase& case_;
  const Type type_;
  dnnl::graph::graph graph_;
  const Dims scores_;
  std::vector<op> ops_;
  size_t next_id_ = kRoles;
};

size_t Count(const tensor& t) {
  size_t count = 1;
  for (const int64_t size : t.get_logical_tensor().get_dims()) {
    count *= static_cast<size_t>(size);
  }
  return count;
}

void Write(const tensor& t, const std::vector<float>& values) {
  const Type type = t.get_logical_tensor().get_data_type();
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == Type::f32) {
      static_cast<float*>(t.get_data_handle())[i] = values[i];
    } else {
      static_cast<uint16_t*>(t.get_data_handle())[i] =
          type == Type::bf16 ? F32ToBf16(values[i]) : F32ToF16(values[i]);
    }
  }
}

std::vector<float> Random(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

std::vector<float> CausalMask(int64_t queries, int64_t keys) {
  std::vector<float> mask(static_cast<size_t>(queries * keys));
  for (int64_t i = 0; i < queries; ++i) {
    for (int64_t j = i + 1; j < keys; ++j) {
      mask[static_cast<size_t>(i * keys + j)] =
          -std::numeric_limits<float>::infinity();
    }
  }
  return mask;
}

}  // namespace

bool TrainingGraph::TakesCase(const AttentionCase& c) {
  return c.heads == c.kv_heads && c.dtype != DType::kF64 && c.window == 0 &&
         c.packed.empty() && !c.bias && !c.mask && c.blocks.empty() &&
         !c.dropout && !c.softcap && !c.alibi && !c.sinks &&
         c.precision == Precision::kFast;
}

TrainingGraph::TrainingGraph(const AttentionCase& c, Form form)
    : form_(form), engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
  Builder forward(c), backward(c);
  for (size_t role = 0; role < kRoles; ++role) {
    if (role == kMask && !c.causal) continue;
    if (role == kStats && form == Form::kSoftmax) continue;
    tensors_[role] = tensor(forward.End(static_cast<Role>(role)), engine_);
  }
  for (const Role role : {kQ, kK, kV, kDout}) {
    const tensor& t = tensors_.at(role);
    Write(t, Random(Count(t), static_cast<uint32_t>(role)));
  }
  Write(tensors_.at(kScale),
        {1.0f / std::sqrt(static_cast<float>(c.head_dim))});
  if (c.causal) Write(tensors_.at(kMask), CausalMask(c.queries, c.keys));

  const auto of = [&](std::initializer_list<Role> roles) {
    Tensors result;
    for (const Role role : roles) {
      if (tensors_.count(role) > 0) result[role] = tensors_.at(role);
    }
    return result;
  };
  forward_ = std::make_unique<CompiledGraph>(forward.Forward(form),
                                             of({kQ, kK, kV, kScale, kMask}),
                                             of({kOut, kStats}), engine_);
  backward_ = std::make_unique<CompiledGraph>(
      backward.Backward(form),
      of({kQ, kK, kV, kScale, kMask, kDout, kOut, kStats}), of({kDq, kDk, kDv}),
      engine_);
}

void TrainingGraph::Run(Pass pass) {
  if (pass != Pass::kBackward) forward_->Run(stream_);
  if (pass != Pass::kForward) backward_->Run(stream_);
}

std::vector<float> TrainingGraph::Values(Role role) const {
  const tensor& t = tensors_.at(role);
  const Type type = t.get_logical_tensor().get_data_type();
  std::vector<float> values(Count(t));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == Type::f32) {
      values[i] = static_cast<const float*>(t.get_data_handle())[i];
    } else {
      const uint16_t bits =
          static_cast<const uint16_t*>(t.get_data_handle())[i];
      values[i] = type == Type::bf16 ? Bf16ToF32(bits) : F16ToF32(bits);
    }
  }
  return values;
}

}  // namespace fa2::bench
