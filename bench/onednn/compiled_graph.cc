// SPDX-License-Identifier: Apache-2.0
#include "bench/onednn/compiled_graph.h"

#include <algorithm>

namespace fa2::bench {
namespace {

using dnnl::graph::logical_tensor;
using dnnl::graph::partition;
using dnnl::graph::tensor;

// A tensor that several operations read is a port for each of them.
std::vector<logical_tensor> Unique(const std::vector<logical_tensor>& ports) {
  std::vector<logical_tensor> result;
  for (const logical_tensor& port : ports) {
    const auto same = [&](const logical_tensor& other) {
      return other.get_id() == port.get_id();
    };
    if (std::none_of(result.begin(), result.end(), same)) {
      result.push_back(port);
    }
  }
  return result;
}

size_t IdOf(const tensor& t) { return t.get_logical_tensor().get_id(); }

// The first partition whose inputs are all there.
std::vector<partition>::iterator FindReady(std::vector<partition>& waiting,
                                           const Tensors& there) {
  return std::find_if(waiting.begin(), waiting.end(), [&](const partition& p) {
    const std::vector<logical_tensor> inputs = p.get_input_ports();
    return std::all_of(inputs.begin(), inputs.end(),
                       [&](const logical_tensor& input) {
                         return there.count(input.get_id()) > 0;
                       });
  });
}

}  // namespace

CompiledGraph::CompiledGraph(const dnnl::graph::graph& graph,
                             const Tensors& inputs, const Tensors& outputs,
                             const dnnl::engine& engine) {
  Tensors there = inputs;
  dnnl::graph::graph finished = graph;  // get_partitions is not const
  std::vector<partition> waiting = finished.get_partitions();
  while (!waiting.empty()) {
    const auto next = FindReady(waiting, there);
    if (next == waiting.end()) {
      throw dnnl::error(dnnl_invalid_graph, "partitions wait for each other");
    }
    const std::vector<logical_tensor> reads = Unique(next->get_input_ports());
    const std::vector<logical_tensor> writes = Unique(next->get_output_ports());
    Step step;
    step.kernel = next->compile(reads, writes, engine);
    for (const logical_tensor& read : reads) {
      step.inputs.push_back(there.at(read.get_id()));
    }
    for (const logical_tensor& write : writes) {
      const size_t id = write.get_id();
      const auto output = outputs.find(id);
      if (output != outputs.end()) {
        there[id] = output->second;
      } else {
        there[id] = tensor(step.kernel.query_logical_tensor(id), engine);
      }
      step.outputs.push_back(there.at(id));
    }
    const logical_tensor wanted = step.kernel.get_scratchpad_logical_tensor();
    if (wanted.get_mem_size() > scratch_bytes_) {
      scratch_bytes_ = wanted.get_mem_size();
      scratch_ = tensor(wanted, engine);
    }
    steps_.push_back(step);
    waiting.erase(next);
  }
  for (Step& step : steps_) {
    const logical_tensor wanted = step.kernel.get_scratchpad_logical_tensor();
    if (wanted.get_mem_size() > 0) {
      step.scratch = tensor(wanted, engine, scratch_.get_data_handle());
    }
  }
  CountBetween(outputs);
}

void CompiledGraph::CountBetween(const Tensors& outputs) {
  std::map<size_t, size_t> last_reader;
  for (size_t i = 0; i < steps_.size(); ++i) {
    for (const tensor& input : steps_[i].inputs) last_reader[IdOf(input)] = i;
  }
  std::map<size_t, size_t> living;  // bytes by id
  for (size_t i = 0; i < steps_.size(); ++i) {
    for (const tensor& output : steps_[i].outputs) {
      if (outputs.count(IdOf(output)) > 0) continue;
      living[IdOf(output)] = output.get_logical_tensor().get_mem_size();
    }
    size_t bytes = 0;
    for (const auto& each : living) bytes += each.second;
    between_bytes_ = std::max(between_bytes_, bytes);
    for (const tensor& input : steps_[i].inputs) {
      if (last_reader[IdOf(input)] == i) living.erase(IdOf(input));
    }
  }
}

void CompiledGraph::Run(dnnl::stream& stream) const {
  for (const Step& step : steps_) {
    step.kernel.execute(stream, step.inputs, step.outputs, step.scratch);
  }
  stream.wait();
}

}  // namespace fa2::bench
