// SPDX-License-Identifier: Apache-2.0
#include "src/attention/call/block_lists.h"

#include <array>
#include <cstring>
#include <string>

#include "src/checks/views.h"

namespace fa2::attention {
namespace {

using checks::CheckDType;
using checks::CheckShape;
using checks::CheckView;
using checks::NamedView;
using checks::ShapeText;

constexpr int64_t kBlockUnit = 16;
constexpr int64_t kLargestBlock = int64_t{1} << 30;

int64_t Load(const ConstTensorView& view, int64_t batch, int64_t head,
             int64_t row, int64_t position) {
  const int64_t offset = batch * view.strides[0] + head * view.strides[1] +
                         row * view.strides[2] + position * view.strides[3];
  int32_t value;
  memcpy(&value, static_cast<const int32_t*>(view.data) + offset,
         sizeof(value));
  return value;
}

std::string At(const char* name, std::initializer_list<int64_t> index) {
  std::string text = std::string(name) + "[";
  for (const int64_t i : index) {
    if (text.back() != '[') text += ", ";
    text += std::to_string(i);
  }
  return text + "]";
}

Status CheckBlockSize(const char* name, int64_t size) {
  if (size > 0 && size % kBlockUnit == 0 && size <= kLargestBlock) {
    return Status::Ok();
  }
  return Status::InvalidArgument(std::string(name) + " is " +
                                 std::to_string(size) +
                                 "; it must be a multiple of 16 from 16 to "
                                 "2^30");
}

Status CheckList(const NamedView& counts, const NamedView& indices,
                 const std::array<int64_t, 3>& rows, int64_t columns) {
  FA2_RETURN_IF_ERROR(CheckView(counts));
  FA2_RETURN_IF_ERROR(CheckView(indices));
  FA2_RETURN_IF_ERROR(CheckDType(counts, {DType::kI32}, "numbers of blocks"));
  FA2_RETURN_IF_ERROR(CheckDType(indices, {DType::kI32}, "columns of blocks"));
  FA2_RETURN_IF_ERROR(checks::CheckStatisticsShape(
      counts, rows, "[B or 1, Hq or 1, rows of blocks of Nq]"));
  const std::array<int64_t, 4>& sizes = indices.view.sizes;
  if (sizes[0] != rows[0] || sizes[1] != rows[1] || sizes[2] != rows[2] ||
      sizes[3] > columns) {
    return Status::InvalidArgument(
        std::string(indices.name) + " has shape " + ShapeText(sizes) +
        "; it must be " + ShapeText({rows[0], rows[1], rows[2], columns}) +
        " or of fewer columns, [.., .., rows, columns of blocks of Nk] with "
        "the first sizes of the numbers of blocks");
  }
  return Status::Ok();
}

// One list of a row.
struct RowList {
  const char* count_name;
  const char* index_name;
  const ConstTensorView& counts;
  const ConstTensorView& indices;
};

// The number of blocks of a row, and that its columns ascend.
Status CheckRowList(const RowList& list, int64_t batch, int64_t head,
                    int64_t row, int64_t columns, int64_t* count) {
  *count = Load(list.counts, batch, head, row, 0);
  if (*count < 0 || *count > list.indices.sizes[3]) {
    return Status::InvalidArgument(At(list.count_name, {batch, head, row}) +
                                   " is " + std::to_string(*count) +
                                   "; it must be 0 to " +
                                   std::to_string(list.indices.sizes[3]) +
                                   ", the columns of " + list.index_name);
  }
  int64_t before = -1;
  for (int64_t n = 0; n < *count; ++n) {
    const int64_t column = Load(list.indices, batch, head, row, n);
    if (column < 0 || column >= columns) {
      return Status::InvalidArgument(
          At(list.index_name, {batch, head, row, n}) + " is " +
          std::to_string(column) + "; it must be 0 to " +
          std::to_string(columns - 1) + ", a column of blocks of the keys");
    }
    if (column <= before) {
      return Status::InvalidArgument(
          At(list.index_name, {batch, head, row, n}) + " is " +
          std::to_string(column) +
          "; the columns of a row must ascend, and the one before is " +
          std::to_string(before));
    }
    before = column;
  }
  return Status::Ok();
}

}  // namespace

Status BlockLists::Set(const BlockMask* given, const Shape& shape) {
  given_ = false;
  if (given == nullptr) return Status::Ok();
  const BlockMask& mask = *given;
  FA2_RETURN_IF_ERROR(CheckBlockSize("block_mask.block_q", mask.block_q));
  FA2_RETURN_IF_ERROR(CheckBlockSize("block_mask.block_k", mask.block_k));
  block_q_ = mask.block_q;
  block_k_ = mask.block_k;
  rows_ = CeilDiv(shape.queries, block_q_);
  columns_ = CeilDiv(shape.keys, block_k_);
  const NamedView counts{"block_mask.kv_num_blocks", mask.kv_num_blocks};
  planes_b_ = counts.view.sizes[0];
  planes_h_ = counts.view.sizes[1];
  if ((planes_b_ != 1 && planes_b_ != shape.batch) ||
      (planes_h_ != 1 && planes_h_ != shape.q_heads)) {
    FA2_RETURN_IF_ERROR(checks::CheckStatisticsShape(
        counts, {shape.batch, shape.q_heads, rows_},
        "[B or 1, Hq or 1, rows of blocks of Nq]"));
  }
  const std::array<int64_t, 3> rows = {planes_b_, planes_h_, rows_};
  FA2_RETURN_IF_ERROR(CheckList(
      counts, {"block_mask.kv_indices", mask.kv_indices}, rows, columns_));
  if (mask.full_kv_num_blocks.given() != mask.full_kv_indices.given()) {
    return Status::InvalidArgument(
        std::string(mask.full_kv_indices.given()
                        ? "block_mask.full_kv_num_blocks"
                        : "block_mask.full_kv_indices") +
        " is not given; full_kv_num_blocks and full_kv_indices must be given "
        "together");
  }
  if (mask.full_kv_num_blocks.given()) {
    FA2_RETURN_IF_ERROR(CheckList(
        {"block_mask.full_kv_num_blocks", mask.full_kv_num_blocks},
        {"block_mask.full_kv_indices", mask.full_kv_indices}, rows, columns_));
  }
  if (mask.bits.given()) {
    const NamedView bits{"block_mask.bits", mask.bits};
    FA2_RETURN_IF_ERROR(CheckView(bits));
    FA2_RETURN_IF_ERROR(CheckDType(bits, {DType::kU8}, "bits of pairs"));
    if (bits.view.strides[3] != 1) {
      return Status::InvalidArgument(
          "block_mask.bits has a last stride of " +
          std::to_string(bits.view.strides[3]) +
          "; the bits of a block must be contiguous");
    }
  }
  FA2_RETURN_IF_ERROR(SetRows(mask));
  given_ = true;
  return Status::Ok();
}

Status BlockLists::SetRows(const BlockMask& mask) {
  blocks_.clear();
  begins_.assign(1, 0);
  seen_.assign(static_cast<size_t>(planes_b_ * planes_h_ * columns_), 0);
  most_keys_ = 0;
  const bool full = mask.full_kv_num_blocks.given();
  const RowList partial_list{"block_mask.kv_num_blocks",
                             "block_mask.kv_indices", mask.kv_num_blocks,
                             mask.kv_indices};
  const RowList full_list{"block_mask.full_kv_num_blocks",
                          "block_mask.full_kv_indices", mask.full_kv_num_blocks,
                          mask.full_kv_indices};
  int64_t partial_blocks = 0;
  for (int64_t b = 0; b < planes_b_; ++b) {
    for (int64_t h = 0; h < planes_h_; ++h) {
      uint8_t* const seen = seen_.data() + Plane(b, h) * columns_;
      for (int64_t row = 0; row < rows_; ++row) {
        int64_t partial_count = 0, full_count = 0;
        FA2_RETURN_IF_ERROR(
            CheckRowList(partial_list, b, h, row, columns_, &partial_count));
        if (full) {
          FA2_RETURN_IF_ERROR(
              CheckRowList(full_list, b, h, row, columns_, &full_count));
        }
        int64_t f = 0;
        const auto full_column = [&] {
          return f < full_count ? Load(mask.full_kv_indices, b, h, row, f)
                                : columns_;
        };
        for (int64_t p = 0; p <= partial_count; ++p) {
          const int64_t column = p < partial_count
                                     ? Load(mask.kv_indices, b, h, row, p)
                                     : columns_;
          for (; full_column() < column; ++f) {
            blocks_.push_back({full_column(), nullptr});
          }
          if (p == partial_count) break;
          if (full_column() == column) {
            return Status::InvalidArgument(
                At("block_mask.full_kv_indices", {b, h, row, f}) + " is " +
                std::to_string(column) +
                ", which is in kv_indices too; a block must be partial or "
                "full");
          }
          const uint8_t* const bits =
              mask.bits.given() && partial_blocks < mask.bits.sizes[2]
                  ? static_cast<const uint8_t*>(mask.bits.data) +
                        partial_blocks * mask.bits.strides[2]
                  : nullptr;
          blocks_.push_back({column, bits});
          ++partial_blocks;
        }
        for (size_t n = begins_.back(); n < blocks_.size(); ++n) {
          seen[blocks_[n].column] = 1;
        }
        begins_.push_back(blocks_.size());
        most_keys_ =
            std::max(most_keys_, (partial_count + full_count) * block_k_);
      }
    }
  }
  if (!mask.bits.given()) return Status::Ok();
  return CheckShape({"block_mask.bits", mask.bits},
                    {1, 1, partial_blocks, block_q_ * (block_k_ / 8)},
                    "[1, 1, partial blocks, block_q * block_k / 8]");
}

bool BlockLists::Any(int64_t batch, int64_t head, const Interval& queries,
                     const Interval& keys) const {
  bool any = false;
  ForParts(batch, head, queries, keys, [&](const Part&) { any = true; });
  return any;
}

bool BlockLists::AnyQuerySees(int64_t batch, int64_t head,
                              const Interval& keys) const {
  if (keys.empty()) return false;
  const uint8_t* const seen = seen_.data() + Plane(batch, head) * columns_;
  for (int64_t c = keys.begin / block_k_; c * block_k_ < keys.end; ++c) {
    if (seen[c] != 0) return true;
  }
  return false;
}

bool BlockLists::Visible(int64_t batch, int64_t head, int64_t i,
                         int64_t j) const {
  bool visible = false;
  ForParts(batch, head, {i, i + 1}, {j, j + 1}, [&](const Part& part) {
    const int64_t key = j - part.first_key;
    visible = part.bits == nullptr ||
              (part.bits[(i - part.first_query) * part.stride + (key >> 3)] >>
                   (key & 7) &
               1) != 0;
  });
  return visible;
}

}  // namespace fa2::attention
