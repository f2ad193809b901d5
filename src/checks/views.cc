// SPDX-License-Identifier: Apache-2.0
#include "src/checks/views.h"

#include <algorithm>
#include <cstdint>

namespace fa2::checks {
namespace {

std::string Text(const int64_t* sizes, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  return text + "]";
}

}  // namespace

std::string ShapeText(const std::array<int64_t, 4>& sizes) {
  return Text(sizes.data(), sizes.size());
}

Status CheckView(const NamedView& tensor) {
  const ConstTensorView& view = tensor.view;
  const uint64_t element = SizeOf(view.dtype);
  if (element == 0) {
    return Status::InvalidArgument(
        std::string(tensor.name) + " has dtype number " +
        std::to_string(static_cast<int>(view.dtype)) +
        "; it must be one of fa2::DType");
  }
  bool has_elements = true;
  for (int64_t size : view.sizes) {
    if (size < 0) {
      return Status::InvalidArgument(std::string(tensor.name) + " has shape " +
                                     ShapeText(view.sizes) +
                                     "; sizes must be 0 or more");
    }
    has_elements &= size > 0;
  }
  if (!has_elements) return Status::Ok();
  // 2^62 bytes leave room for sums of two such spans.
  const uint64_t limit = (uint64_t{1} << 62) / element;
  uint64_t reach = 1;
  uint64_t count = 1;
  for (int i = 0; i < 4; ++i) {
    const uint64_t size = static_cast<uint64_t>(view.sizes[i]);
    const uint64_t stride = static_cast<uint64_t>(view.strides[i]);
    uint64_t step;
    bool overflows = __builtin_mul_overflow(
        view.strides[i] < 0 ? 0 - stride : stride, size - 1, &step);
    overflows |= __builtin_add_overflow(reach, step, &reach);
    overflows |= __builtin_mul_overflow(count, size, &count);
    if (overflows || reach > limit || count > limit) {
      return Status::InvalidArgument(
          std::string(tensor.name) + " has shape " + ShapeText(view.sizes) +
          " and strides " + ShapeText(view.strides) +
          "; its elements must lie within 2^62 bytes");
    }
  }
  if (view.data == nullptr) {
    return Status::InvalidArgument(std::string(tensor.name) +
                                   " is null; it must point to " +
                                   ShapeText(view.sizes) + " elements");
  }
  if (reinterpret_cast<uintptr_t>(view.data) % element != 0) {
    return Status::InvalidArgument(
        std::string(tensor.name) + " is not aligned; " + NameOf(view.dtype) +
        " data must be aligned to " + std::to_string(element) + " bytes");
  }
  return Status::Ok();
}

Status CheckDType(const NamedView& tensor, std::initializer_list<DType> allowed,
                  const char* why) {
  if (std::find(allowed.begin(), allowed.end(), tensor.view.dtype) !=
      allowed.end()) {
    return Status::Ok();
  }
  std::string names;
  for (DType dtype : allowed) {
    names += (names.empty() ? "" : " or ") + std::string(NameOf(dtype));
  }
  return Status::InvalidArgument(std::string(tensor.name) + " has dtype " +
                                 NameOf(tensor.view.dtype) + "; it must be " +
                                 names + (*why == '\0' ? "" : ", ") + why);
}

Status CheckShape(const NamedView& tensor,
                  const std::array<int64_t, 4>& expected, const char* meaning) {
  if (tensor.view.sizes == expected) return Status::Ok();
  return Status::InvalidArgument(
      std::string(tensor.name) + " has shape " + ShapeText(tensor.view.sizes) +
      "; it must be " + ShapeText(expected) + ", " + meaning);
}

Status CheckStatisticsShape(const NamedView& tensor,
                            const std::array<int64_t, 3>& expected,
                            const char* meaning) {
  const auto& sizes = tensor.view.sizes;
  if (sizes == std::array<int64_t, 4>{expected[0], expected[1], expected[2], 1})
    return Status::Ok();
  return Status::InvalidArgument(
      std::string(tensor.name) + " has shape " +
      (sizes[3] == 1 ? Text(sizes.data(), 3) : ShapeText(sizes)) +
      "; it must be " + Text(expected.data(), 3) + ", " + meaning);
}

}  // namespace fa2::checks
