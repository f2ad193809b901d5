// SPDX-License-Identifier: Apache-2.0
#include "tests/support/attention_run.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

namespace fa2::test {
namespace {

// The accumulated outputs' contents before the call.
AttentionOutputs Before(const AttentionCase& c, const AttentionOutputs& o) {
  const auto copy = [](bool accumulate, const Tensor& from) {
    Tensor to;
    if (!accumulate || !from.given()) return to;
    to = MakeTensor(DType::kF64, from.view.sizes);
    Copy(from.view, to.view);
    return to;
  };
  AttentionOutputs before;
  before.dq = copy(c.accumulate_dq, o.dq);
  before.dk = copy(c.accumulate_dk, o.dk);
  before.dv = copy(c.accumulate_dv, o.dv);
  before.dbias = copy(c.accumulate_dbias, o.dbias);
  return before;
}

std::vector<const Tensor*> Given(const AttentionOutputs& o) {
  std::vector<const Tensor*> given;
  for (const Tensor* t :
       {&o.out, &o.lse, &o.dq, &o.dk, &o.dv, &o.dbias, &o.dalibi, &o.dsinks}) {
    if (t->given()) given.push_back(t);
  }
  return given;
}

// Workspace in which every float is a NaN, so that it shows where something is
// read that was not written.
Allocator NanAllocator() {
  Allocator allocator;
  allocator.allocate = [](void*, size_t bytes, size_t alignment) {
    bytes = (bytes + alignment - 1) / alignment * alignment;
    void* const memory = std::aligned_alloc(alignment, bytes);
    if (memory != nullptr) memset(memory, 0xFF, bytes);
    return memory;
  };
  allocator.release = [](void*, void* memory, size_t) { std::free(memory); };
  return allocator;
}

void Snapshot(const AttentionInputs& inputs, const AttentionOutputs& outputs) {
  for (const auto& buffer : inputs.Buffers()) {
    buffer->Snapshot();
    buffer->ForbidWriting();
  }
  for (const Tensor* t : Given(outputs)) t->buffer->Snapshot();
}

void CheckMemory(const AttentionInputs& inputs, const AttentionOutputs& outputs,
                 std::vector<std::string>* failures) {
  for (const auto& buffer : inputs.Buffers()) {
    if (buffer->ChangedOutside({})) failures->push_back("an input was written");
  }
  std::map<Buffer*, std::vector<ConstTensorView>> written;
  for (const Tensor* t : Given(outputs)) {
    written[t->buffer.get()].push_back(t->view);
  }
  for (const auto& [buffer, views] : written) {
    if (buffer->ChangedOutside(views)) {
      failures->push_back("memory beside an output was written");
    }
  }
}

}  // namespace

std::vector<std::string> CheckAttention(const AttentionCase& c,
                                        const AttentionInputs& inputs,
                                        const ExpectedOutputs& expected,
                                        const std::vector<Context*>& contexts) {
  std::vector<std::string> failures;
  AttentionOutputs first;
  for (size_t n = 0; n < contexts.size() && failures.empty(); ++n) {
    const AttentionOutputs outputs = MakeOutputs(c, inputs);
    const AttentionOutputs before = Before(c, outputs);
    Snapshot(inputs, outputs);
    Status status = AttentionForward(ForwardArgs(inputs, outputs), contexts[n]);
    if (!status.ok()) failures.push_back("forward: " + status.message());
    if (status.ok()) {
      status = AttentionBackward(BackwardArgs(c, inputs, outputs), contexts[n]);
      if (!status.ok()) failures.push_back("backward: " + status.message());
    }
    CheckMemory(inputs, outputs, &failures);
    if (!status.ok()) break;
    if (n == 0) {
      for (auto& f : CompareForward(c, outputs, expected)) {
        failures.push_back(f);
      }
      for (auto& f : CompareBackward(c, outputs, expected, before)) {
        failures.push_back(f);
      }
      first = outputs;
      continue;
    }
    const auto given = Given(outputs);
    const auto reference = Given(first);
    for (size_t t = 0; t < given.size(); ++t) {
      if (given[t] == &outputs.lse && c.padded_lse) continue;
      if (!SameBits(given[t]->view, reference[t]->view)) {
        failures.push_back("output " + std::to_string(t) +
                           " differs in bits between contexts 0 and " +
                           std::to_string(n));
      }
    }
  }
  return failures;
}

std::vector<std::string> CheckAttention(const AttentionCase& c,
                                        const AttentionInputs& inputs,
                                        const std::vector<Context*>& contexts) {
  return CheckAttention(c, inputs, ComputeExpected(c, inputs), contexts);
}

std::vector<std::string> CheckAttention(const AttentionCase& c,
                                        const std::vector<Context*>& contexts) {
  return CheckAttention(c, MakeInputs(c), contexts);
}

void ExpectAttention(const AttentionCase& c, const AttentionInputs& inputs,
                     const std::vector<Context*>& contexts) {
  for (const std::string& failure : CheckAttention(c, inputs, contexts)) {
    ADD_FAILURE() << failure << "\n  in " << Describe(c);
  }
}

void ExpectAttention(const AttentionCase& c,
                     const std::vector<Context*>& contexts) {
  ExpectAttention(c, MakeInputs(c), contexts);
}

Contexts::Contexts(const std::vector<int>& threads) {
  for (const int n : threads) {
    ContextOptions options;
    options.num_threads = n;
    options.allocator = NanAllocator();
    std::unique_ptr<Context> context;
    const Status status = Context::Create(options, &context);
    if (!status.ok()) throw std::runtime_error(status.message());
    list_.push_back(context.get());
    owned_.push_back(std::move(context));
  }
}

int CasesOfSixteen() {
  Context* context = nullptr;
  if (!Context::Default(&context).ok()) return 0;
  const std::string target = context->Info().target;
  if (target == "scalar" || target == "emu128") return 1;
  const char* const few = std::getenv("FA2_TEST_FEW_CASES");
  if (few != nullptr && std::string(few) == "2") return 2;
  const bool all = std::getenv("FA2_MAX_TARGET") == nullptr &&
                   std::getenv("FA2_TEST_OTHER_ENGINE") == nullptr &&
                   few == nullptr;
  return all ? 16 : 4;
}

AttentionCase GroupedCase(DType dtype, int64_t head_dim) {
  AttentionCase c;
  c.dtype = dtype;
  c.heads = 2;
  c.kv_heads = 1;
  c.nq = CasesOfSixteen() == 16 ? 203 : 75;
  c.nk = 331;
  c.head_dim = c.value_dim = head_dim;
  return c;
}

}  // namespace fa2::test
