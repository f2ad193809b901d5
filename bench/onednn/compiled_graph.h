// SPDX-License-Identifier: Apache-2.0

// A oneDNN graph as oneDNN cuts it: partitions, compiled and run in order.
#ifndef FA2_BENCH_ONEDNN_COMPILED_GRAPH_H_
#define FA2_BENCH_ONEDNN_COMPILED_GRAPH_H_

#include <cstddef>
#include <map>
#include <vector>

#include "oneapi/dnnl/dnnl_graph.hpp"

namespace fa2::bench {

// Tensors by the id of their logical tensor.
using Tensors = std::map<size_t, dnnl::graph::tensor>;

class CompiledGraph {
 public:
  // `graph` is finalized. Makes the tensors that lie between partitions. Throws
  // dnnl::error, also where a partition is not supported.
  CompiledGraph(const dnnl::graph::graph& graph, const Tensors& inputs,
                const Tensors& outputs, const dnnl::engine& engine);

  void Run(dnnl::stream& stream) const;

  size_t partitions() const { return steps_.size(); }
  // What a run needs beside inputs and outputs: the largest scratchpad, which
  // the partitions share, and the tensors between them, as many as somebody yet
  // reads at once (each has memory of its own here).
  size_t scratch_bytes() const { return scratch_bytes_; }
  size_t between_bytes() const { return between_bytes_; }

 private:
  struct Step {
    dnnl::graph::compiled_partition kernel;
    std::vector<dnnl::graph::tensor> inputs, outputs;
    dnnl::graph::tensor scratch;
  };

  void CountBetween(const Tensors& outputs);

  std::vector<Step> steps_;
  dnnl::graph::tensor scratch_;
  size_t scratch_bytes_ = 0;
  size_t between_bytes_ = 0;
};

}  // namespace fa2::bench

#endif  // FA2_BENCH_ONEDNN_COMPILED_GRAPH_H_
