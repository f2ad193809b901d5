// SPDX-License-Identifier: Apache-2.0

// What a recorded attention call was told: the options of a case.
#ifndef FA2_SRC_VERIFY_CASES_OPTIONS_H_
#define FA2_SRC_VERIFY_CASES_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "fa2/attention.h"

namespace fa2::verify {

enum class Layout { kBhsd, kBshd, kThd };

// What a kernel's products are rounded to.
enum class Products { kBF16, kF16, kF32, kTF32, kF64 };

const char* NameOf(Layout layout);
const char* NameOf(Products products);

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

// Sets what a JSON object of options says, keys as in docs/check_gpu_port.md;
// keys that mean nothing here are left alone. Throws Error, with `where` in
// front, for a value that does not fit its key.
void ReadOptions(const std::string& json, const std::string& where,
                 Options* options);
// The same options as a JSON object.
std::string WriteOptions(const Options& options);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_CASES_OPTIONS_H_
