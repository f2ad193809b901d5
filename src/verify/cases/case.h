// SPDX-License-Identifier: Apache-2.0

// One call of an attention forward and backward as it was recorded: its
// tensors as they lie in a file, and its options.
#ifndef FA2_SRC_VERIFY_CASES_CASE_H_
#define FA2_SRC_VERIFY_CASES_CASE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fa2/types.h"
#include "src/verify/cases/options.h"

namespace fa2::verify {

// An array in dense row-major order, with the shape that the file gives it.
struct Array {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  std::shared_ptr<const void> owner;  // keeps data alive

  int64_t elements() const;
};

// What the ranks of a distributed run have cut.
enum class ShardBy {
  kSequence,  // rank r has the r-th run of rows
  kZigzag,    // of 2 n runs, the first longer by one where they must be, rank
              // r has runs r and 2 n - 1 - r
  kStriped,   // rank r has every n-th row, from r on
  kHeads,
  kBatch,
};

// Where the rows, heads or batches of a joined case were.
struct Shards {
  ShardBy by = ShardBy::kSequence;
  int64_t ranks = 1;

  // How many each rank has of a dimension that is cut, by its size.
  std::map<int64_t, std::vector<int64_t>> counts;

  // The rank that has index `at` of a dimension of `size`.
  int64_t RankOf(int64_t at, int64_t size) const;
};

struct Case {
  std::string name;  // "" of a plain file
  Options options;
  Shards shards;
  // By canonical name (names.h).
  std::map<std::string, Array> tensors;
  // The file's tensors whose names say nothing.
  std::vector<std::string> unread;

  const Array* Find(const std::string& name) const;
};

// The inputs of `inputs` with the outputs of `outputs`; out and lse are those
// of `inputs` where `outputs` has none.
Case Combine(const Case& inputs, const Case& outputs);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_CASES_CASE_H_
