// SPDX-License-Identifier: Apache-2.0

// A small GPT: token embedding, layers of RMS norm, causal grouped-query
// attention with ALiBi in place of position embeddings, RMS norm and a
// squared-ReLU MLP; a last RMS norm and a linear head. Everything but the
// linear layers runs on fa2's kernels.
#ifndef FA2_EXAMPLES_TRAIN_GPT_MODEL_H_
#define FA2_EXAMPLES_TRAIN_GPT_MODEL_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "examples/train_gpt/data.h"
#include "examples/train_gpt/linear.h"
#include "fa2/attention.h"
#include "fa2/context.h"

namespace train_gpt {

struct ModelConfig {
  int64_t layers = 4;
  int64_t dim = 128;
  int64_t heads = 4;     // a divisor of dim
  int64_t kv_heads = 2;  // a divisor of heads
  int64_t sequence = 128;
  int64_t batch = 8;

  int64_t head_dim() const { return dim / heads; }
  int64_t qkv_dim() const { return (heads + 2 * kv_heads) * head_dim(); }
  int64_t mlp_dim() const { return 4 * dim; }
  int64_t tokens() const { return batch * sequence; }
};

struct Parameter {
  std::string name;
  bool is_matrix;  // a linear layer's weight
  std::vector<float> value;
  std::vector<float> gradient;
};

class Model {
 public:
  // Weights are drawn from `random`. The context and the workers must outlive
  // the model.
  Model(const ModelConfig& config, std::mt19937_64* random,
        fa2::Context* context, const Workers* workers);

  // Mean cross entropy, in nats a byte, of the batch's targets.
  double Loss(const Batch& batch);
  // The same, and its gradient in every parameter.
  double LossAndGradients(const Batch& batch);

  std::vector<Parameter>& parameters() { return parameters_; }
  int64_t ParameterCount() const;

 private:
  // Indices into parameters_.
  struct Layer {
    size_t norm1, qkv, project, norm2, up, down;
  };
  // What the backward needs of a layer's forward.
  struct Activations {
    std::vector<float> x, normed1, qkv, attended, lse;
    std::vector<float> middle, normed2, up, squared;
  };

  size_t Add(const std::string& name, int64_t rows, int64_t cols, double sigma,
             std::mt19937_64* random);
  const float* Value(size_t index) const {
    return parameters_[index].value.data();
  }
  float* Gradient(size_t index) { return parameters_[index].gradient.data(); }

  double Forward(const Batch& batch, bool want_gradients);
  void LayerForward(const Layer& layer, Activations* a, float* x);
  void LayerBackward(const Layer& layer, const Activations& a, float* dx);
  void Backward(const Batch& batch);

  void Norm(size_t weight, const float* x, float* y);
  // dx += gradient through the norm.
  void NormBackward(size_t weight, const float* x, const float* dy, float* dx);
  fa2::AttentionOptions AttentionOptions() const;
  // One of q, k, v inside the packed qkv, [batch, heads, sequence, head_dim].
  fa2::TensorView Slice(const float* qkv, int64_t first_head,
                        int64_t heads) const;
  fa2::TensorView Attended(const float* data) const;
  fa2::TensorView Lse(const float* data) const;

  ModelConfig config_;
  fa2::Context* context_;
  const Workers* workers_;
  std::vector<Parameter> parameters_;
  size_t embedding_, last_norm_, head_;
  std::vector<Layer> layers_;
  std::vector<float> alibi_slopes_;

  std::vector<Activations> activations_;
  std::vector<float> x_, normed_, logits_, dlogits_;
  std::vector<float> dx_, dnormed_, dwide_, dqkv_, dattended_;  // scratch
};

}  // namespace train_gpt

#endif  // FA2_EXAMPLES_TRAIN_GPT_MODEL_H_
