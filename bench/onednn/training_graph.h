// SPDX-License-Identifier: Apache-2.0

// Attention's forward and backward for training in oneDNN Graph's operations.
#ifndef FA2_BENCH_ONEDNN_TRAINING_GRAPH_H_
#define FA2_BENCH_ONEDNN_TRAINING_GRAPH_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "bench/attention/case.h"
#include "bench/onednn/compiled_graph.h"

namespace fa2::bench {

// What a graph reads or writes; also the id of its logical tensor.
enum Role : size_t {
  kQ,
  kK,
  kV,
  kDout,
  kScale,  // f32 [1]
  kMask,   // f32 [1, 1, queries, keys], added: 0 or -inf
  kOut,
  kStats,  // logsumexp of the scaled, masked scores, f32 [B, H, queries, 1]
  kDq,
  kDk,
  kDv,
  kRoles,
};

enum class Form {
  // What oneDNN's guide defines for SDPA training: the forward gives the
  // logsumexp, the backward computes P = exp(S - logsumexp) and
  // dS = P * (dP - rowsum(O * dO)).
  kPattern,
  // The forward gives O alone; the backward is made of SoftMax and
  // SoftMaxBackward, and reads neither O nor the logsumexp.
  kSoftmax,
};

class TrainingGraph {
 public:
  // Of a case without options and with as many kv heads as heads: TakesCase.
  // Inputs are random, of variance 1. Throws dnnl::error.
  TrainingGraph(const AttentionCase& c, Form form);
  static bool TakesCase(const AttentionCase& c);

  // Forward, backward or both. The backward reads what a forward has left.
  void Run(Pass pass);

  // A tensor's values as f32; of kStats only where the form has it.
  std::vector<float> Values(Role role) const;

  Form form() const { return form_; }
  const CompiledGraph& forward() const { return *forward_; }
  const CompiledGraph& backward() const { return *backward_; }

 private:
  Form form_;
  dnnl::engine engine_;
  dnnl::stream stream_;
  Tensors tensors_;
  std::unique_ptr<CompiledGraph> forward_, backward_;
};

}  // namespace fa2::bench

#endif  // FA2_BENCH_ONEDNN_TRAINING_GRAPH_H_
