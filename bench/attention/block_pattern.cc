// SPDX-License-Identifier: Apache-2.0
#include "bench/attention/block_pattern.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <utility>

namespace fa2::bench {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kBytes = kBlock * kBlock / 8;  // of a block's bits

// A number in [0, 1) for each block.
double Draw(int64_t row, int64_t column) {
  uint64_t x = static_cast<uint64_t>(row) << 32 | static_cast<uint64_t>(column);
  for (int round = 0; round < 3; ++round) {  // SplitMix64
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1p-53;
}

using Rule = std::function<bool(int64_t query, int64_t key)>;

Rule RuleOf(const std::string& name, int64_t keys) {
  const int64_t columns = std::max<int64_t>(1, keys / kBlock);
  if (name == "documents") {
    return [](int64_t q, int64_t k) { return q / 1000 == k / 1000; };
  }
  if (name == "window") {
    return [](int64_t q, int64_t k) {
      return std::abs(q - k) <= 512 || q < 64 || k < 64;
    };
  }
  if (name == "prefix") {
    return [keys](int64_t q, int64_t k) { return k < keys / 4 || k <= q; };
  }
  if (name == "strided") {
    return [](int64_t q, int64_t k) {
      return k <= q && (q - k < 256 || k % 1024 >= 896);
    };
  }
  if (name == "bigbird") {
    return [columns](int64_t q, int64_t k) {
      const int64_t row = q / kBlock, column = k / kBlock;
      return std::abs(row - column) <= 1 || row < 2 || column < 2 ||
             Draw(row, column) < 3.0 / static_cast<double>(columns);
    };
  }
  if (name == "random") {
    return
        [](int64_t q, int64_t k) { return Draw(q / kBlock, k / kBlock) < 0.1; };
  }
  return nullptr;
}

}  // namespace

bool BlockPattern::IsName(const std::string& name) {
  return RuleOf(name, 0) != nullptr;
}

BlockPattern::BlockPattern(const std::string& name, int64_t queries,
                           int64_t keys)
    : rows_((queries + kBlock - 1) / kBlock),
      columns_((keys + kBlock - 1) / kBlock),
      counts_(static_cast<size_t>(rows_)),
      indices_(static_cast<size_t>(rows_ * columns_)),
      full_counts_(counts_),
      full_indices_(indices_) {
  const Rule shows = RuleOf(name, keys);
  std::vector<uint8_t> block(static_cast<size_t>(kBytes));
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t column = 0; column < columns_; ++column) {
      std::fill(block.begin(), block.end(), uint8_t{0});
      const int64_t q_end = std::min(queries, (row + 1) * kBlock);
      const int64_t k_end = std::min(keys, (column + 1) * kBlock);
      int64_t shown = 0;
      for (int64_t q = row * kBlock; q < q_end; ++q) {
        for (int64_t k = column * kBlock; k < k_end; ++k) {
          if (!shows(q, k)) continue;
          ++shown;
          block[static_cast<size_t>((q % kBlock * kBlock + k % kBlock) / 8)] |=
              static_cast<uint8_t>(1 << k % 8);
        }
      }
      if (shown == 0) continue;
      pairs_ += static_cast<double>(shown);
      const bool full =
          shown == (q_end - row * kBlock) * (k_end - column * kBlock);
      int32_t& count =
          (full ? full_counts_ : counts_)[static_cast<size_t>(row)];
      (full ? full_indices_
            : indices_)[static_cast<size_t>(row * columns_ + count++)] =
          static_cast<int32_t>(column);
      if (!full) bits_.insert(bits_.end(), block.begin(), block.end());
    }
  }
}

BlockMask BlockPattern::mask() const {
  const auto list = [&](const std::vector<int32_t>& values, int64_t last) {
    return Dense(static_cast<const void*>(values.data()), DType::kI32, 1, 1,
                 rows_, last);
  };
  BlockMask mask;
  mask.block_q = mask.block_k = kBlock;
  mask.kv_num_blocks = list(counts_, 1);
  mask.kv_indices = list(indices_, columns_);
  mask.full_kv_num_blocks = list(full_counts_, 1);
  mask.full_kv_indices = list(full_indices_, columns_);
  if (!bits_.empty()) {
    mask.bits = Dense(static_cast<const void*>(bits_.data()), DType::kU8, 1, 1,
                      static_cast<int64_t>(bits_.size()) / kBytes, kBytes);
  }
  return mask;
}

}  // namespace fa2::bench
