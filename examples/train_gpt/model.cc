// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "fa2/training_ops.h"

namespace train_gpt {
namespace {

using fa2::DType;

void Check(const fa2::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

size_t Count(int64_t rows, int64_t cols) {
  return static_cast<size_t>(rows) * static_cast<size_t>(cols);
}

fa2::TensorView Matrix(const float* data, int64_t rows, int64_t cols) {
  return fa2::Dense(const_cast<float*>(data), DType::kF32, 1, 1, rows, cols);
}

fa2::ConstTensorView Ids(const std::vector<int32_t>& ids) {
  return fa2::Dense(static_cast<const void*>(ids.data()), DType::kI32, 1, 1, 1,
                    static_cast<int64_t>(ids.size()));
}

// Pieces of an elementwise loop: 64 KiB of f32.
constexpr int64_t kPiece = 16384;

}  // namespace

Model::Model(const ModelConfig& config, std::mt19937_64* random,
             fa2::Context* context, const Workers* workers)
    : config_(config), context_(context), workers_(workers) {
  const int64_t dim = config.dim;
  // Variance 1 through every layer; the two branches of a layer add to the
  // residual stream, so their outputs start small (GPT-2's rule).
  const double sigma = 1 / std::sqrt(static_cast<double>(dim));
  const double branch = 1 / std::sqrt(2.0 * static_cast<double>(config.layers));
  const double wide = 1 / std::sqrt(static_cast<double>(config.mlp_dim()));
  embedding_ = Add("embedding", kVocabulary, dim, 1.0, random);
  parameters_[embedding_].is_matrix = false;
  for (int64_t l = 0; l < config.layers; ++l) {
    const std::string name = "layer " + std::to_string(l) + " ";
    Layer layer;
    layer.norm1 = Add(name + "norm 1", 1, dim, 0, random);
    layer.qkv = Add(name + "qkv", dim, config.qkv_dim(), sigma, random);
    layer.project = Add(name + "project", dim, dim, sigma * branch, random);
    layer.norm2 = Add(name + "norm 2", 1, dim, 0, random);
    layer.up = Add(name + "up", dim, config.mlp_dim(), sigma, random);
    layer.down =
        Add(name + "down", config.mlp_dim(), dim, wide * branch, random);
    layers_.push_back(layer);
  }
  last_norm_ = Add("last norm", 1, dim, 0, random);
  head_ = Add("head", dim, kVocabulary, sigma, random);

  // 2^(-8 h / heads), as Press et al. 2022 (arXiv:2108.12409) choose them.
  for (int64_t h = 1; h <= config.heads; ++h) {
    alibi_slopes_.push_back(std::exp2(-8.0f * static_cast<float>(h) /
                                      static_cast<float>(config.heads)));
  }

  const int64_t n = config.tokens();
  activations_.resize(layers_.size());
  for (Activations& a : activations_) {
    for (auto* v : {&a.x, &a.normed1, &a.attended, &a.middle, &a.normed2}) {
      v->resize(Count(n, dim));
    }
    a.qkv.resize(Count(n, config.qkv_dim()));
    a.lse.resize(Count(n, config.heads));
    a.up.resize(Count(n, config.mlp_dim()));
    a.squared.resize(Count(n, config.mlp_dim()));
  }
  for (auto* v : {&x_, &normed_, &dx_, &dnormed_, &dattended_}) {
    v->resize(Count(n, dim));
  }
  logits_.resize(Count(n, kVocabulary));
  dlogits_.resize(Count(n, kVocabulary));
  dwide_.resize(Count(n, config.mlp_dim()));
  dqkv_.resize(Count(n, config.qkv_dim()));
}

// A norm's weight (one row) starts as 1, a matrix as normal numbers.
size_t Model::Add(const std::string& name, int64_t rows, int64_t cols,
                  double sigma, std::mt19937_64* random) {
  Parameter p;
  p.name = name;
  p.is_matrix = rows > 1;
  p.value.assign(Count(rows, cols), 1.0f);
  p.gradient.assign(p.value.size(), 0.0f);
  if (rows > 1) {
    std::normal_distribution<float> normal(0.0f, static_cast<float>(sigma));
    for (float& x : p.value) x = normal(*random);
  }
  parameters_.push_back(std::move(p));
  return parameters_.size() - 1;
}

int64_t Model::ParameterCount() const {
  size_t count = 0;
  for (const Parameter& p : parameters_) count += p.value.size();
  return static_cast<int64_t>(count);
}

double Model::Loss(const Batch& batch) { return Forward(batch, false); }

double Model::LossAndGradients(const Batch& batch) {
  for (Parameter& p : parameters_) {
    std::fill(p.gradient.begin(), p.gradient.end(), 0.0f);
  }
  const double loss = Forward(batch, true);
  Backward(batch);
  return loss;
}

double Model::Forward(const Batch& batch, bool want_gradients) {
  const int64_t n = config_.tokens();
  const int64_t dim = config_.dim;
  const float* embedding = Value(embedding_);
  for (int64_t t = 0; t < n; ++t) {
    const float* row = embedding + batch.inputs[static_cast<size_t>(t)] * dim;
    std::copy(row, row + dim, x_.data() + t * dim);
  }
  for (size_t l = 0; l < layers_.size(); ++l) {
    LayerForward(layers_[l], &activations_[l], x_.data());
  }
  Norm(last_norm_, x_.data(), normed_.data());
  LinearForward(*workers_, n, dim, kVocabulary, normed_.data(), Value(head_),
                logits_.data());

  double loss = 0;
  fa2::CrossEntropyArgs args;
  args.logits = Matrix(logits_.data(), n, kVocabulary);
  args.targets = Ids(batch.targets);
  args.loss = fa2::Dense(&loss, DType::kF64, 1, 1, 1, 1);
  if (want_gradients) args.dlogits = Matrix(dlogits_.data(), n, kVocabulary);
  Check(fa2::CrossEntropy(args, context_));
  return loss;
}

void Model::LayerForward(const Layer& layer, Activations* a, float* x) {
  const int64_t n = config_.tokens();
  const int64_t dim = config_.dim;
  std::copy(x, x + n * dim, a->x.data());
  Norm(layer.norm1, a->x.data(), a->normed1.data());
  LinearForward(*workers_, n, dim, config_.qkv_dim(), a->normed1.data(),
                Value(layer.qkv), a->qkv.data());
  fa2::AttentionForwardArgs args;
  args.q = Slice(a->qkv.data(), 0, config_.heads);
  args.k = Slice(a->qkv.data(), config_.heads, config_.kv_heads);
  args.v =
      Slice(a->qkv.data(), config_.heads + config_.kv_heads, config_.kv_heads);
  args.options = AttentionOptions();
  args.out = Attended(a->attended.data());
  args.lse = Lse(a->lse.data());
  Check(fa2::AttentionForward(args, context_));
  LinearForward(*workers_, n, dim, dim, a->attended.data(),
                Value(layer.project), x);
  const float* before = a->x.data();
  float* middle = a->middle.data();
  workers_->For(n * dim, kPiece, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) middle[i] = before[i] + x[i];
  });

  Norm(layer.norm2, middle, a->normed2.data());
  LinearForward(*workers_, n, dim, config_.mlp_dim(), a->normed2.data(),
                Value(layer.up), a->up.data());
  const float* up = a->up.data();
  float* squared = a->squared.data();
  workers_->For(n * config_.mlp_dim(), kPiece,
                [=](int64_t first, int64_t last) {
                  for (int64_t i = first; i < last; ++i) {
                    const float positive = std::max(0.0f, up[i]);
                    squared[i] = positive * positive;
                  }
                });
  LinearForward(*workers_, n, config_.mlp_dim(), dim, squared,
                Value(layer.down), x);
  workers_->For(n * dim, kPiece, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) x[i] += middle[i];
  });
}

void Model::Backward(const Batch& batch) {
  const int64_t n = config_.tokens();
  const int64_t dim = config_.dim;
  LinearBackward(*workers_, n, dim, kVocabulary, normed_.data(), Value(head_),
                 dlogits_.data(), dnormed_.data(), Gradient(head_));
  std::fill(dx_.begin(), dx_.end(), 0.0f);
  NormBackward(last_norm_, x_.data(), dnormed_.data(), dx_.data());
  for (size_t l = layers_.size(); l-- > 0;) {
    LayerBackward(layers_[l], activations_[l], dx_.data());
  }
  fa2::EmbeddingBackwardArgs args;
  args.dy = Matrix(dx_.data(), n, dim);
  args.ids = Ids(batch.inputs);
  args.dweight = Matrix(Gradient(embedding_), kVocabulary, dim);
  args.accumulate_dweight = true;
  Check(fa2::EmbeddingBackward(args, context_));
}

// dx: gradient of the layer's output on entry, of its input on return.
void Model::LayerBackward(const Layer& layer, const Activations& a, float* dx) {
  const int64_t n = config_.tokens();
  const int64_t dim = config_.dim;
  LinearBackward(*workers_, n, config_.mlp_dim(), dim, a.squared.data(),
                 Value(layer.down), dx, dwide_.data(), Gradient(layer.down));
  const float* up = a.up.data();
  float* dwide = dwide_.data();
  workers_->For(n * config_.mlp_dim(), kPiece,
                [=](int64_t first, int64_t last) {
                  for (int64_t i = first; i < last; ++i) {
                    dwide[i] *= 2 * std::max(0.0f, up[i]);
                  }
                });
  LinearBackward(*workers_, n, dim, config_.mlp_dim(), a.normed2.data(),
                 Value(layer.up), dwide, dnormed_.data(), Gradient(layer.up));
  NormBackward(layer.norm2, a.middle.data(), dnormed_.data(), dx);

  LinearBackward(*workers_, n, dim, dim, a.attended.data(),
                 Value(layer.project), dx, dattended_.data(),
                 Gradient(layer.project));
  fa2::AttentionBackwardArgs args;
  args.dout = Attended(dattended_.data());
  args.q = Slice(a.qkv.data(), 0, config_.heads);
  args.k = Slice(a.qkv.data(), config_.heads, config_.kv_heads);
  args.v =
      Slice(a.qkv.data(), config_.heads + config_.kv_heads, config_.kv_heads);
  args.out = Attended(a.attended.data());
  args.lse = Lse(a.lse.data());
  args.options = AttentionOptions();
  args.dq = Slice(dqkv_.data(), 0, config_.heads);
  args.dk = Slice(dqkv_.data(), config_.heads, config_.kv_heads);
  args.dv =
      Slice(dqkv_.data(), config_.heads + config_.kv_heads, config_.kv_heads);
  Check(fa2::AttentionBackward(args, context_));
  LinearBackward(*workers_, n, dim, config_.qkv_dim(), a.normed1.data(),
                 Value(layer.qkv), dqkv_.data(), dnormed_.data(),
                 Gradient(layer.qkv));
  NormBackward(layer.norm1, a.x.data(), dnormed_.data(), dx);
}

void Model::Norm(size_t weight, const float* x, float* y) {
  const int64_t n = config_.tokens();
  Check(fa2::RmsNorm(Matrix(x, n, config_.dim),
                     Matrix(Value(weight), 1, config_.dim), 1e-5,
                     Matrix(y, n, config_.dim), context_));
}

void Model::NormBackward(size_t weight, const float* x, const float* dy,
                         float* dx) {
  const int64_t n = config_.tokens();
  float* through = dattended_.data();
  fa2::RmsNormBackwardArgs args;
  args.dy = Matrix(dy, n, config_.dim);
  args.x = Matrix(x, n, config_.dim);
  args.weight = Matrix(Value(weight), 1, config_.dim);
  args.dx = Matrix(through, n, config_.dim);
  args.dweight = Matrix(Gradient(weight), 1, config_.dim);
  args.accumulate_dweight = true;
  Check(fa2::RmsNormBackward(args, context_));
  workers_->For(n * config_.dim, kPiece, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) dx[i] += through[i];
  });
}

fa2::AttentionOptions Model::AttentionOptions() const {
  fa2::AttentionOptions options;
  options.causal = fa2::Causal::kTopLeft;
  options.alibi_slopes =
      fa2::Dense(static_cast<const void*>(alibi_slopes_.data()), DType::kF32, 1,
                 config_.heads, 1, 1);
  return options;
}

fa2::TensorView Model::Slice(const float* qkv, int64_t first_head,
                             int64_t heads) const {
  const int64_t row = config_.qkv_dim();
  fa2::TensorView view;
  view.data = const_cast<float*>(qkv) + first_head * config_.head_dim();
  view.sizes = {config_.batch, heads, config_.sequence, config_.head_dim()};
  view.strides = {config_.sequence * row, config_.head_dim(), row, 1};
  return view;
}

fa2::TensorView Model::Attended(const float* data) const {
  fa2::TensorView view;
  view.data = const_cast<float*>(data);
  view.sizes = {config_.batch, config_.heads, config_.sequence,
                config_.head_dim()};
  view.strides = {config_.sequence * config_.dim, config_.head_dim(),
                  config_.dim, 1};
  return view;
}

fa2::TensorView Model::Lse(const float* data) const {
  return fa2::Dense(const_cast<float*>(data), DType::kF32, config_.batch,
                    config_.heads, config_.sequence, 1);
}

}  // namespace train_gpt
