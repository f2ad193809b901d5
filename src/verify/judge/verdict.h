// SPDX-License-Identifier: Apache-2.0

// Whether one tensor is as near to the answer as an honest kernel's would be.
#ifndef FA2_SRC_VERIFY_JUDGE_VERDICT_H_
#define FA2_SRC_VERIFY_JUDGE_VERDICT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/verify/judge/bounds.h"
#include "src/verify/model/answer.h"
#include "src/verify/model/array4.h"
#include "src/verify/model/model.h"
#include "src/verify/model/problem.h"

namespace fa2::verify {

struct Worst {
  std::vector<int64_t> index;  // in the file's own dimensions
  double got = 0.0;
  double expected = 0.0;
};

struct TensorVerdict {
  std::string name;
  bool pass = true;
  std::optional<double> relative_l2;  // none where the answer is 0
  double bound = 0.0;
  double twin_relative_l2 = 0.0;
  double cosine = 1.0;
  // Error over bound of the worst tile and of the worst element.
  double tile_ratio = 0.0;
  double element_ratio = 0.0;
  Worst worst;
  std::optional<bool> own;
  std::optional<double> own_relative_l2;
  int64_t bad = 0;  // NaN or infinite where the answer is not, or the reverse
  std::vector<std::string> findings;  // sentences

  // By [batch][head][tile of kTileRows rows]; tiles of one head lie together.
  Sizes sizes = {0, 0, 0, 0};
  int64_t tiles = 0;
  std::vector<SliceError> map;
  // Errors of elements over the bound of an element, by powers of 2: bin n
  // counts [2^(n-16), 2^(n-15)).
  std::vector<int64_t> histogram;
};

// What a tensor is held against.
struct Expected {
  const Array4<double>* answer = nullptr;
  // The twin's, before it is stored.
  const Array4<float>* twin_f32 = nullptr;
  const Array4<double>* twin_f64 = nullptr;
  const Array4<RowError>* error = nullptr;  // rows', may be left out
};

// The candidate's tensor, dense [B, H, N, D]; lse in the file's base.
Array4<double> LoadCandidate(const Problem& problem, const std::string& name);

TensorVerdict Judge(const Problem& problem, const std::string& name,
                    const Array4<double>& candidate, const Expected& expected);

// What an index of the dense array is in the file.
std::vector<int64_t> FileIndex(const Problem& problem, const std::string& name,
                               const Sizes& at);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_VERDICT_H_
