// SPDX-License-Identifier: Apache-2.0
#include "src/reference/block_mask.h"

#include <algorithm>
#include <string>

#include "src/reference/tensor_access.h"

namespace fa2::reference {
namespace {

int64_t Number(const ConstTensorView& view, int64_t a, int64_t b, int64_t c,
               int64_t d) {
  return static_cast<int64_t>(Load(view, a, b, c, d));
}

// Calls visit(batch, head, row, position, column) for what a list holds.
template <class Visit>
void ForListed(const ConstTensorView& counts, const ConstTensorView& indices,
               const Visit& visit) {
  for (int64_t b = 0; b < counts.sizes[0]; ++b) {
    for (int64_t h = 0; h < counts.sizes[1]; ++h) {
      for (int64_t row = 0; row < counts.sizes[2]; ++row) {
        const int64_t count = Number(counts, b, h, row, 0);
        for (int64_t n = 0; n < count; ++n) {
          visit(b, h, row, n, Number(indices, b, h, row, n));
        }
      }
    }
  }
}

Status CheckList(const char* name, const ConstTensorView& counts,
                 const ConstTensorView& indices, const ConstTensorView& q,
                 int64_t rows, int64_t columns) {
  const auto wrong = [&](const std::string& what) {
    return Status::InvalidArgument("block_mask: " + std::string(name) +
                                   " must " + what);
  };
  if (counts.dtype != DType::kI32 || indices.dtype != DType::kI32) {
    return wrong("be i32");
  }
  const auto broadcasts = [](int64_t size, int64_t full) {
    return size == 1 || size == full;
  };
  if (!broadcasts(counts.sizes[0], q.sizes[0]) ||
      !broadcasts(counts.sizes[1], q.sizes[1]) || counts.sizes[2] != rows ||
      counts.sizes[3] != 1) {
    return wrong("have numbers of blocks of [B or 1, H or 1, " +
                 std::to_string(rows) + "]");
  }
  if (!std::equal(counts.sizes.begin(), counts.sizes.begin() + 3,
                  indices.sizes.begin())) {
    return wrong("have indices of the first sizes of its numbers");
  }
  if (indices.sizes[3] > columns) {
    return wrong("have at most " + std::to_string(columns) + " columns");
  }
  for (int64_t b = 0; b < counts.sizes[0]; ++b) {
    for (int64_t h = 0; h < counts.sizes[1]; ++h) {
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t count = Number(counts, b, h, row, 0);
        if (count < 0 || count > indices.sizes[3]) {
          return wrong("have as many blocks in a row as it says, not " +
                       std::to_string(count));
        }
      }
    }
  }
  bool ascends = true;
  int64_t before = -1;
  ForListed(counts, indices,
            [&](int64_t, int64_t, int64_t, int64_t n, int64_t column) {
              if (n == 0) before = -1;
              ascends &= column > before && column < columns;
              before = column;
            });
  return ascends ? Status::Ok()
                 : wrong("have columns that ascend from 0 to less than " +
                         std::to_string(columns));
}

}  // namespace

Status CheckBlockMask(const BlockMask& mask, const ConstTensorView& q,
                      const ConstTensorView& k) {
  for (const int64_t size : {mask.block_q, mask.block_k}) {
    if (size <= 0 || size % 16 != 0 || size > int64_t{1} << 30) {
      return Status::InvalidArgument(
          "block_mask: a block of " + std::to_string(size) +
          " rows must be a multiple of 16 up to 2^30");
    }
  }
  const int64_t rows = (q.sizes[2] + mask.block_q - 1) / mask.block_q;
  const int64_t columns = (k.sizes[2] + mask.block_k - 1) / mask.block_k;
  Status status = CheckList("kv_num_blocks", mask.kv_num_blocks,
                            mask.kv_indices, q, rows, columns);
  if (!status.ok()) return status;
  const bool full = mask.full_kv_num_blocks.given();
  if (full != mask.full_kv_indices.given()) {
    return Status::InvalidArgument(
        "block_mask: the lists of full blocks must be given together");
  }
  if (full) {
    status = CheckList("full_kv_num_blocks", mask.full_kv_num_blocks,
                       mask.full_kv_indices, q, rows, columns);
    if (!status.ok()) return status;
    if (mask.full_kv_num_blocks.sizes != mask.kv_num_blocks.sizes) {
      return Status::InvalidArgument(
          "block_mask: both lists must have as many rows");
    }
  }
  int64_t partial = 0;
  ForListed(mask.kv_num_blocks, mask.kv_indices,
            [&](int64_t, int64_t, int64_t, int64_t, int64_t) { ++partial; });
  if (mask.bits.given() &&
      (mask.bits.dtype != DType::kU8 || mask.bits.sizes[0] != 1 ||
       mask.bits.sizes[1] != 1 || mask.bits.sizes[2] != partial ||
       mask.bits.sizes[3] != mask.block_q * (mask.block_k / 8))) {
    return Status::InvalidArgument(
        "block_mask: bits must be u8 of [1, 1, " + std::to_string(partial) +
        ", " + std::to_string(mask.block_q * (mask.block_k / 8)) + "]");
  }
  return Status::Ok();
}

std::vector<bool> VisibleKeys(const BlockMask& mask, int64_t batch,
                              int64_t head, int64_t i, int64_t keys) {
  const auto index = [&](int dim, int64_t n) {
    return mask.kv_num_blocks.sizes[static_cast<size_t>(dim)] == 1 ? 0 : n;
  };
  const int64_t row = i / mask.block_q;
  std::vector<bool> visible(static_cast<size_t>(keys), false);
  // Calls set(key, its number in the block) for the keys of a block.
  const auto for_keys = [&](int64_t column, const auto& set) {
    const int64_t begin = column * mask.block_k;
    const int64_t end = std::min(keys, begin + mask.block_k);
    for (int64_t key = begin; key < end; ++key) set(key, key - begin);
  };
  if (mask.full_kv_num_blocks.given()) {
    const int64_t count = Number(mask.full_kv_num_blocks, batch, head, row, 0);
    for (int64_t n = 0; n < count; ++n) {
      for_keys(Number(mask.full_kv_indices, batch, head, row, n),
               [&](int64_t key, int64_t) {
                 visible[static_cast<size_t>(key)] = true;
               });
    }
  }
  // The number of the row's first partial block.
  int64_t block = 0;
  if (mask.bits.given()) {
    const auto& sizes = mask.kv_num_blocks.sizes;
    const int64_t own =
        (index(0, batch) * sizes[1] + index(1, head)) * sizes[2] + row;
    for (int64_t n = 0; n < own; ++n) {
      block += Number(mask.kv_num_blocks, n / sizes[2] / sizes[1],
                      n / sizes[2] % sizes[1], n % sizes[2], 0);
    }
  }
  const int64_t count = Number(mask.kv_num_blocks, batch, head, row, 0);
  for (int64_t n = 0; n < count; ++n) {
    for_keys(Number(mask.kv_indices, batch, head, row, n), [&](int64_t key,
                                                               int64_t j) {
      bool shown = true;
      if (mask.bits.given()) {
        const int64_t byte = (i % mask.block_q) * (mask.block_k / 8) + j / 8;
        shown = (Number(mask.bits, 0, 0, block + n, byte) >> j % 8 & 1) != 0;
      }
      visible[static_cast<size_t>(key)] = shown;
    });
  }
  return visible;
}

}  // namespace fa2::reference
