// SPDX-License-Identifier: Apache-2.0

// One call of an attention forward and backward as it was recorded: its
// tensors as they lie in a file, and its options.
#ifndef FA2_SRC_VERIFY_CASE_H_
#define FA2_SRC_VERIFY_CASE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fa2/attention.h"
#include "fa2/types.h"

namespace fa2::verify {

enum class Layout { kBhsd, kBshd, kThd };

// What a kernel's products are rounded to.
enum class Products { kBF16, kF16, kF32, kTF32, kF64 };

const char* NameOf(Layout layout);
const char* NameOf(Products products);

// An array in dense row-major order, with the shape that the file gives it.
struct Array {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  std::shared_ptr<const void> owner;  // keeps data alive

  int64_t elements() const;
};

struct Options {
  Layout layout = Layout::kBhsd;
  Causal causal = Causal::kNone;
  int64_t window_left = -1;  // -1: unbounded
  int64_t window_right = -1;
  std::optional<double> scale;
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::optional<uint64_t> philox_seed;
  uint64_t philox_offset = 0;
  bool lse_base2 = false;
  std::optional<Products> precision;  // none: q's dtype
};

struct Case {
  std::string name;  // "" of a plain file
  Options options;
  // By canonical name: q k v dout out lse dq dk dv bias dbias dlse sinks dsinks
  // alibi_slopes dalibi_slopes cu_seqlens_q cu_seqlens_k keep.
  std::map<std::string, Array> tensors;

  const Array* Find(const std::string& name) const;
};

// The names above, inputs before outputs.
const std::vector<std::string>& InputNames();
const std::vector<std::string>& OutputNames();

// "grad_query" -> "dq"; empty where the name means nothing here.
std::string CanonicalName(const std::string& name);

// Sets what a JSON object of options says, keys as in docs/check_gpu_port.md;
// keys that mean nothing here are left alone. Throws Error, with `where` in
// front, for a value that does not fit its key.
void ReadOptions(const std::string& json, const std::string& where,
                 Options* options);
// The same options as a JSON object.
std::string WriteOptions(const Options& options);

// The inputs of `inputs` with the outputs of `outputs`; out and lse are those
// of `inputs` where `outputs` has none.
Case Combine(const Case& inputs, const Case& outputs);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_CASE_H_
