// SPDX-License-Identifier: Apache-2.0
#include "src/ops/arguments.h"

#include <array>

namespace fa2::ops {
namespace {

Status CheckTypedView(const NamedView& x, std::initializer_list<DType> types) {
  FA2_RETURN_IF_ERROR(checks::CheckView(x));
  return checks::CheckDType(x, types, "");
}

}  // namespace

Status CheckRows(const NamedView& x, std::initializer_list<DType> types) {
  FA2_RETURN_IF_ERROR(CheckTypedView(x, types));
  if (x.view.sizes[3] <= 1 || x.view.strides[3] == 1) return Status::Ok();
  return Status::InvalidArgument(
      std::string(x.name) + " has stride " + std::to_string(x.view.strides[3]) +
      " in its last dimension; the elements of a row must be contiguous");
}

Status CheckVector(const NamedView& x, std::initializer_list<DType> types,
                   int64_t n) {
  FA2_RETURN_IF_ERROR(CheckTypedView(x, types));
  return CheckShape(x, {1, 1, 1, n}, "a vector");
}

Status CheckType(const NamedView& x, const NamedView& like) {
  if (x.view.dtype == like.view.dtype) return Status::Ok();
  return checks::CheckDType(x, {like.view.dtype},
                            (std::string("as ") + like.name + " has").c_str());
}

Status CheckRowsLike(const NamedView& x, const NamedView& like) {
  FA2_RETURN_IF_ERROR(CheckRows(x, kFloats));
  FA2_RETURN_IF_ERROR(CheckType(x, like));
  return CheckShape(x, like.view.sizes,
                    (std::string("the shape of ") + like.name).c_str());
}

Status CheckIndices(const NamedView& x, int64_t limit, const char* limit_name,
                    std::optional<int64_t> ignored, int64_t* counted) {
  *counted = 0;
  for (int64_t i = 0; i < x.view.sizes[3]; ++i) {
    const int64_t index = IndexAt(x.view, i);
    if (ignored.has_value() && index == *ignored) continue;
    if (index < 0 || index >= limit) {
      std::string sentence = std::string(x.name) + "[" + std::to_string(i) +
                             "] is " + std::to_string(index) +
                             "; it must be in [0, " + std::to_string(limit) +
                             "), the range of " + limit_name;
      if (ignored.has_value()) {
        sentence += ", or the ignored index " + std::to_string(*ignored);
      }
      return Status::InvalidArgument(sentence);
    }
    ++*counted;
  }
  return Status::Ok();
}

}  // namespace fa2::ops
