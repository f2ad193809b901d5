// SPDX-License-Identifier: Apache-2.0

// cuda_port CASE.safetensors RESULT.safetensors [BUG]
//
// Runs the GPU kernel on what `fa2 gen` wrote and leaves its outputs for
// `fa2 verify CASE.safetensors RESULT.safetensors`. BUG plants a mistake, by
// the id that fa2 verify has for it.
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "tensor_file.h"

namespace {

struct Named {
  const char* name;
  Bug bug;
};

constexpr Named kBugs[] = {{"scale_missing", kScaleMissing},
                           {"delta_missing", kDeltaMissing},
                           {"lse_base2", kLseBase2},
                           {"causal_top_left", kCausalTopLeft},
                           {"last_key_tile_skipped", kLastKeyTileSkipped},
                           {"head_map_modulo", kHeadMapModulo},
                           {"group_not_summed", kGroupNotSummed},
                           {"dq_overwritten", kDqOverwritten}};

Bug BugNamed(const std::string& name) {
  std::string all;
  for (const Named& known : kBugs) {
    if (name == known.name) return known.bug;
    all += std::string(" ") + known.name;
  }
  throw std::runtime_error("BUG is " + name + ", it must be one of" + all);
}

std::vector<uint16_t> Bits(const Tensor& tensor) {
  std::vector<uint16_t> bits(tensor.bytes.size() / 2);
  std::memcpy(bits.data(), tensor.bytes.data(), bits.size() * 2);
  return bits;
}

template <class T>
Tensor Filled(const char* name, const char* dtype, std::vector<int64_t> shape,
              const std::vector<T>& values) {
  Tensor tensor = {name, dtype, std::move(shape), {}};
  tensor.bytes.resize(values.size() * sizeof(T));
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

void RunFile(const std::string& in, const std::string& out, Bug bug) {
  const TensorFile file = TensorFile::Read(in);
  const Tensor &q = file.Get("q"), &k = file.Get("k"), &v = file.Get("v");
  if (k.shape != v.shape || q.shape[3] != k.shape[3]) {
    throw std::runtime_error(in + ": q, k and v must have one head dim");
  }
  if (file.OptionIs("causal", "top_left")) {
    throw std::runtime_error(in +
                             ": causal is top_left, it must be "
                             "bottom_right or none");
  }
  Attention call;
  call.batch = static_cast<int>(q.shape[0]);
  call.heads = static_cast<int>(q.shape[1]);
  call.kv_heads = static_cast<int>(k.shape[1]);
  call.nq = static_cast<int>(q.shape[2]);
  call.nk = static_cast<int>(k.shape[2]);
  call.dim = static_cast<int>(q.shape[3]);
  call.causal = file.OptionIs("causal", "bottom_right");
  call.q = Bits(q);
  call.k = Bits(k);
  call.v = Bits(v);
  call.dout = Bits(file.Get("dout"));
  const std::string error = Run(bug, &call);
  if (!error.empty()) throw std::runtime_error(error);
  WriteTensors(out, {Filled("out", "BF16", q.shape, call.out),
                     Filled("lse", "F32", {q.shape[0], q.shape[1], q.shape[2]},
                            call.lse),
                     Filled("dq", "BF16", q.shape, call.dq),
                     Filled("dk", "BF16", k.shape, call.dk),
                     Filled("dv", "BF16", v.shape, call.dv)});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::fprintf(stderr, "usage: cuda_port CASE RESULT [BUG]\n");
    return 2;
  }
  try {
    RunFile(argv[1], argv[2], argc == 4 ? BugNamed(argv[3]) : kNone);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_port: %s\n", error.what());
    return 2;
  }
  return 0;
}
