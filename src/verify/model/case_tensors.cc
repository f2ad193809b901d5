// SPDX-License-Identifier: Apache-2.0
#include "src/verify/model/case_tensors.h"

#include "src/reference/tensor_access.h"
#include "src/verify/cases/error.h"

namespace fa2::verify {
namespace {

// The names of the dimensions of a layout, for sentences.
const char* Words(Layout layout) {
  switch (layout) {
    case Layout::kBhsd:
      return "[B, H, N, D]";
    case Layout::kBshd:
      return "[B, N, H, D]";
    case Layout::kThd:
      return "[total, H, D]";
  }
  return "";
}

}  // namespace

std::string Text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

std::string Text(const Sizes& sizes) {
  return Text(std::vector<int64_t>(sizes.begin(), sizes.end()));
}

std::string CaseTensors::Where() const {
  return case_.name.empty() ? "" : case_.name + ": ";
}

std::string CaseTensors::Named(const std::string& name) const {
  return Where() + "tensor " + name;
}

void CaseTensors::WrongShape(const std::string& name,
                             const std::string& must) const {
  throw Error(Named(name) + " has shape " + Text(case_.Find(name)->shape) +
              ", it must be " + must);
}

void CaseTensors::RequireFloat(const std::string& name) const {
  const DType t = DTypeOf(name);
  if (t != DType::kF32 && t != DType::kBF16 && t != DType::kF16 &&
      t != DType::kF64) {
    throw Error(Named(name) + " has dtype " + fa2::NameOf(t) +
                ", it must be f32, bf16, f16 or f64");
  }
}

LogicalTensor CaseTensors::Rows(const std::string& name) const {
  const Array& array = *case_.Find(name);
  const Layout layout = case_.options.layout;
  RequireFloat(name);
  std::vector<int> dims = {0, 1, 2, 3};
  if (layout != Layout::kBhsd) dims = {0, 2, 1, 3};
  const size_t rank = array.shape.size();
  if (rank < 2 || rank > 4) WrongShape(name, Words(layout));
  if (rank == 2) return Arrange(array, {2, 3});
  if (rank == 3) dims.erase(dims.begin());
  LogicalTensor tensor = Arrange(array, dims);
  if (layout == Layout::kThd && tensor.view.sizes[0] != 1) {
    WrongShape(name, Words(layout));
  }
  return tensor;
}

LogicalTensor CaseTensors::RowsOf(const std::string& name,
                                  const Sizes& sizes) const {
  LogicalTensor tensor = Rows(name);
  if (tensor.view.sizes != sizes) {
    WrongShape(name, "logically [B, H, N, D] = " + Text(sizes) + " in layout " +
                         NameOf(case_.options.layout));
  }
  return tensor;
}

LogicalTensor CaseTensors::Broadcast(const std::string& name,
                                     const Sizes& full) const {
  const Array& array = *case_.Find(name);
  const size_t rank = array.shape.size();
  const std::string must =
      "[B or 1, H or 1, Nq or 1, Nk or 1] of B, H, Nq, Nk = " + Text(full);
  if (rank > 4) WrongShape(name, must);
  std::vector<int> dims;
  for (size_t d = 0; d < rank; ++d) {
    dims.push_back(static_cast<int>(4 - rank + d));
  }
  LogicalTensor tensor = Arrange(array, dims);
  for (size_t d = 0; d < 4; ++d) {
    const int64_t n = tensor.view.sizes[d];
    if (n != 1 && n != full[d]) WrongShape(name, must);
  }
  return tensor;
}

LogicalTensor CaseTensors::PerHead(const std::string& name, int64_t heads,
                                   int64_t batch) const {
  const Array& array = *case_.Find(name);
  RequireFloat(name);
  const int64_t n = array.elements();
  LogicalTensor tensor;
  if (n == heads) {
    tensor.view.sizes = {1, heads, 1, 1};
  } else if (batch > 0 && n == batch * heads) {
    tensor.view.sizes = {batch, heads, 1, 1};
  } else {
    WrongShape(name, batch > 0 ? "[H] or [B, H]" : "[H]");
  }
  tensor.view.data = array.data;
  tensor.view.dtype = array.dtype;
  tensor.view.strides = DenseStrides(tensor.view.sizes);
  tensor.rank = array.shape.size();
  // The dimensions that are not 1, in order: [B,] H.
  int last = -1, before = -1;
  for (size_t d = 0; d < tensor.rank; ++d) {
    if (array.shape[d] == 1) continue;
    before = last;
    last = static_cast<int>(d);
  }
  if (heads > 1) {
    tensor.file_dimension[1] = last;
    tensor.file_dimension[0] = before;
  } else {
    tensor.file_dimension[0] = last;
  }
  return tensor;
}

LogicalTensor CaseTensors::Statistic(const std::string& name) const {
  RequireFloat(name);
  Array array = *case_.Find(name);
  const size_t rank = array.shape.size();
  if (rank > 3 && array.shape.back() == 1) array.shape.pop_back();
  const size_t dims = array.shape.size();
  if (dims < 1 || dims > 3) WrongShape(name, "[B, H, N]");
  const std::vector<int> all = {0, 1, 2};
  LogicalTensor tensor =
      Arrange(array, {all.end() - static_cast<ptrdiff_t>(dims), all.end()});
  tensor.rank = rank;
  return tensor;
}

std::vector<int64_t> CaseTensors::PrefixSums(const std::string& name,
                                             int64_t total) const {
  const Array& array = *case_.Find(name);
  if (array.dtype != DType::kI32 && array.dtype != DType::kI64) {
    throw Error(Named(name) + " has dtype " + fa2::NameOf(array.dtype) +
                ", it must be i32 or i64");
  }
  std::vector<int64_t> sums;
  for (int64_t i = 0; i < array.elements(); ++i) {
    sums.push_back(array.dtype == DType::kI32
                       ? reference::ElementAs<int32_t>(array.data, i)
                       : reference::ElementAs<int64_t>(array.data, i));
  }
  bool good = sums.size() >= 2 && sums.front() == 0 && sums.back() <= total;
  for (size_t i = 1; i < sums.size(); ++i) good &= sums[i - 1] <= sums[i];
  if (!good) {
    throw Error(Named(name) +
                " must rise from 0 to at most the number of rows, " +
                std::to_string(total));
  }
  return sums;
}

}  // namespace fa2::verify
