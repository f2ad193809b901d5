// SPDX-License-Identifier: Apache-2.0

// Arrays of any library, taken by DLPack without a copy and described as
// fa2's tensor views.
#ifndef FA2_PYTHON_SRC_ARRAY_H_
#define FA2_PYTHON_SRC_ARRAY_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fa2/types.h"

namespace fa2::python {

namespace nb = nanobind;

// How the dimensions of q, k, v, out and their gradients are ordered.
enum class Layout { kBHSD, kBSHD, kTHD };

// "bhsd", "bshd" or "thd"; throws ValueError for another word.
Layout ParseLayout(const std::string& layout);

// A borrowed array: keeps the owner alive, holds pointer, dtype, sizes and
// strides (in elements). None is an array that is not given. uint16 is read as
// bf16. A tuple (address, DType, shape, strides in elements, …) is an array of
// the package's own making. Throws TypeError for what is no array, is not on
// the CPU or holds another element type, with a sentence that starts with
// `name`.
class InputArray {
 public:
  InputArray(const char* name, nb::handle object);
  // Of a tensor that ReadTensor (tensor_exchange.h) reads, which is taken
  // without its autograd history; else the same. Whoever calls keeps it alive.
  static InputArray OfTensor(const char* name, nb::handle object);
  // Of a tensor that ReadTensor reads or, where it reads none, a tuple;
  // nothing, and no exception, for all else.
  static std::optional<InputArray> IfTensor(const char* name,
                                            nb::handle object);

  bool given() const { return view_.data != nullptr; }
  DType dtype() const { return view_.dtype; }
  const std::vector<int64_t>& shape() const { return shape_; }
  // Rows one after the other, in the order of the dimensions, without gaps.
  bool contiguous() const;

  // The array as [B, H, N, D]; 4 dimensions, 3 in layout "thd".
  ConstTensorView Tensor(Layout layout) const;
  // [B, H, N] as [B, H, N, 1]; in layout "thd" [H, total] as [1, H, total, 1].
  ConstTensorView RowValues(Layout layout) const;
  // Up to 4 dimensions, with leading ones.
  ConstTensorView Leading() const;
  // [H] or [B, H] as [B or 1, H, 1, 1].
  ConstTensorView PerHead() const;
  // [n] as [1, 1, 1, n].
  ConstTensorView Vector() const;

 private:
  explicit InputArray(const char* name) : name_(name) {}

  // What is known of the array once its shape and strides are: `data` is where
  // it lies.
  void SetData(const void* data);
  const void* TakeDescriptor(PyObject* descriptor);
  const void* TakeArray(nb::handle object);
  [[noreturn]] void WrongRank(const char* wanted) const;
  ConstTensorView View(const std::array<int, 4>& dims) const;

  const char* name_;
  nb::ndarray<nb::ro> array_;
  ConstTensorView view_;  // data and dtype; sizes and strides are set by View
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
};

// The same for arrays that are written, which the package itself allocated.
class OutputArray {
 public:
  OutputArray(const char* name, nb::handle object);
  static OutputArray OfTensor(const char* name, nb::handle object);

  TensorView Tensor(Layout layout) const;
  TensorView RowValues(Layout layout) const;
  TensorView Leading() const;
  TensorView PerHead() const;
  TensorView Vector() const;

 private:
  explicit OutputArray(InputArray array) : array_(std::move(array)) {}
  static TensorView Writable(const ConstTensorView& view);

  InputArray array_;
};

}  // namespace fa2::python

#endif  // FA2_PYTHON_SRC_ARRAY_H_
