// SPDX-License-Identifier: Apache-2.0
#include "src/verify/cases/case.h"

#include "src/verify/cases/names.h"

namespace fa2::verify {

int64_t Array::elements() const {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

const Array* Case::Find(const std::string& name) const {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : &found->second;
}

Case Combine(const Case& inputs, const Case& outputs) {
  Case result;
  result.name = inputs.name;
  result.options = inputs.options;
  result.unread = outputs.unread;
  result.shards = outputs.shards.ranks > 1 ? outputs.shards : inputs.shards;
  for (const std::string& name : InputNames()) {
    if (const Array* array = inputs.Find(name)) result.tensors[name] = *array;
  }
  for (const std::string& name : OutputNames()) {
    const Array* array = outputs.Find(name);
    if (array == nullptr && (name == "out" || name == "lse")) {
      array = inputs.Find(name);
    }
    if (array != nullptr) result.tensors[name] = *array;
  }
  return result;
}

}  // namespace fa2::verify
