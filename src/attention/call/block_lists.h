// SPDX-License-Identifier: Apache-2.0

// A block mask as the algorithm reads it: checked, and its two lists of a row
// merged into one.
#ifndef FA2_SRC_ATTENTION_CALL_BLOCK_LISTS_H_
#define FA2_SRC_ATTENTION_CALL_BLOCK_LISTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fa2/block_mask.h"
#include "fa2/status.h"
#include "src/common/integers.h"

namespace fa2::attention {

class BlockLists {
 public:
  // A block in which something may be visible. `bits`: those of its pairs;
  // nullptr: all of them are.
  struct Block {
    int64_t column = 0;
    const uint8_t* bits = nullptr;
  };

  // The tensors that a mask is checked against.
  struct Shape {
    int64_t batch = 0, q_heads = 0, queries = 0, keys = 0;
  };

  // Of a mask that may be nullptr: none. On success the lists are filled; the
  // mask's bits are read as long as they are used.
  Status Set(const BlockMask* mask, const Shape& shape);

  bool given() const { return given_; }

  // Everything below counts rows of queries and keys of the tensors, and is
  // only for lists that are given.

  // What of a listed block lies within some queries x keys.
  struct Part {
    Interval queries, keys;
    // Of the block. Query i sees key j if bit (j - first_key) & 7 of
    // bits[(i - first_query) * stride + ((j - first_key) >> 3)] is set; without
    // bits it does.
    int64_t first_query = 0, first_key = 0;
    const uint8_t* bits = nullptr;
    int64_t stride = 0;
  };
  // Calls visit(part) for all of them, by row and column.
  template <class Visit>
  void ForParts(int64_t batch, int64_t head, const Interval& queries,
                const Interval& keys, const Visit& visit) const {
    if (queries.empty() || keys.empty()) return;
    for (int64_t row = queries.begin / block_q_; row * block_q_ < queries.end;
         ++row) {
      const Interval of_row = {std::max(queries.begin, row * block_q_),
                               std::min(queries.end, (row + 1) * block_q_)};
      const size_t list = RowIndex(batch, head, row);
      const Block* const end = blocks_.data() + begins_[list + 1];
      const Block* block = std::lower_bound(
          blocks_.data() + begins_[list], end, keys.begin / block_k_,
          [](const Block& b, int64_t column) { return b.column < column; });
      for (; block != end && block->column * block_k_ < keys.end; ++block) {
        const int64_t first = block->column * block_k_;
        visit(Part{
            of_row,
            {std::max(keys.begin, first), std::min(keys.end, first + block_k_)},
            row * block_q_,
            first,
            block->bits,
            block_k_ / 8});
      }
    }
  }

  // Whether anything may be visible of queries x keys.
  bool Any(int64_t batch, int64_t head, const Interval& queries,
           const Interval& keys) const;
  // Whether any query of the head may see any of the keys.
  bool AnyQuerySees(int64_t batch, int64_t head, const Interval& keys) const;
  // Whether query i sees key j.
  bool Visible(int64_t batch, int64_t head, int64_t i, int64_t j) const;

  // Heads whose lists differ, or 1.
  int64_t heads() const { return planes_h_; }

  // More keys than this no query sees.
  int64_t most_keys() const { return most_keys_; }

 private:
  Status SetRows(const BlockMask& mask);
  size_t Plane(int64_t batch, int64_t head) const {
    return static_cast<size_t>((planes_b_ == 1 ? 0 : batch) * planes_h_ +
                               (planes_h_ == 1 ? 0 : head));
  }
  size_t RowIndex(int64_t batch, int64_t head, int64_t row) const {
    return Plane(batch, head) * static_cast<size_t>(rows_) +
           static_cast<size_t>(row);
  }

  bool given_ = false;
  int64_t block_q_ = 1, block_k_ = 1;
  int64_t planes_b_ = 1, planes_h_ = 1, rows_ = 0, columns_ = 0;
  int64_t most_keys_ = 0;
  std::vector<Block> blocks_;   // [plane][row], by column
  std::vector<size_t> begins_;  // of a plane's row, in blocks_
  std::vector<uint8_t> seen_;   // [plane][column]: some row lists it
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_CALL_BLOCK_LISTS_H_
