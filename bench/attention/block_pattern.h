// SPDX-License-Identifier: Apache-2.0

// Block masks of models by name, from a rule for pairs of a query and a key.
#ifndef FA2_BENCH_ATTENTION_BLOCK_PATTERN_H_
#define FA2_BENCH_ATTENTION_BLOCK_PATTERN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "fa2/block_mask.h"

namespace fa2::bench {

class BlockPattern {
 public:
  // "documents": of 1,000 tokens each. "window": 512 tokens to both sides, and
  // 64 that see and are seen by all. "prefix": the first quarter, then causal.
  // "strided": causal, the 256 tokens before and the last 128 of each 1,024
  // (Child et al. 2019, arXiv:1904.10509). "bigbird": a window of three blocks,
  // two global blocks and three random ones a row (Zaheer et al. 2020,
  // arXiv:2007.14062). "random": a tenth of all blocks.
  static bool IsName(const std::string& name);

  // Blocks of 128 x 128, never an array of all pairs.
  BlockPattern(const std::string& name, int64_t queries, int64_t keys);

  // As long as the pattern lives.
  BlockMask mask() const;
  double pairs() const { return pairs_; }  // visible

 private:
  int64_t rows_, columns_;
  double pairs_ = 0;
  std::vector<int32_t> counts_, indices_, full_counts_, full_indices_;
  std::vector<uint8_t> bits_;
};

}  // namespace fa2::bench

#endif  // FA2_BENCH_ATTENTION_BLOCK_PATTERN_H_
