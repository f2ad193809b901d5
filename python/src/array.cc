// SPDX-License-Identifier: Apache-2.0
#include "python/src/array.h"

#include <algorithm>
#include <exception>
#include <sstream>

#include "python/src/tensor_exchange.h"

namespace fa2::python {
namespace {

// What an array without elements points to: many libraries give it no memory,
// and a view without data means "not given".
alignas(64) unsigned char g_no_elements[64];

std::string TypeName(nb::handle object) {
  return nb::str(object.type().attr("__name__")).c_str();
}

bool ParseDType(nb::dlpack::dtype given, DType* dtype) {
  if (given.lanes != 1) return false;
  switch (static_cast<nb::dlpack::dtype_code>(given.code)) {
    case nb::dlpack::dtype_code::Float:
      if (given.bits == 32) return *dtype = DType::kF32, true;
      if (given.bits == 16) return *dtype = DType::kF16, true;
      if (given.bits == 64) return *dtype = DType::kF64, true;
      return false;
    case nb::dlpack::dtype_code::Bfloat:
      if (given.bits == 16) return *dtype = DType::kBF16, true;
      return false;
    case nb::dlpack::dtype_code::UInt:
      if (given.bits == 16) return *dtype = DType::kBF16, true;
      if (given.bits == 8) return *dtype = DType::kU8, true;
      return false;
    case nb::dlpack::dtype_code::Int:
      if (given.bits == 32) return *dtype = DType::kI32, true;
      if (given.bits == 64) return *dtype = DType::kI64, true;
      return false;
    case nb::dlpack::dtype_code::Bool:
      if (given.bits == 8) return *dtype = DType::kBool, true;
      return false;
    default:
      return false;
  }
}

// DLPack's number of the device that the object says it is on, or of the CPU
// where it says nothing that can be read.
int DeviceType(nb::handle object) {
  if (!nb::hasattr(object, "__dlpack_device__")) return nb::device::cpu::value;
  try {
    const nb::object device = object.attr("__dlpack_device__")();
    return nb::cast<int>(nb::int_(device[0]));
  } catch (const std::exception&) {
    PyErr_Clear();
    return nb::device::cpu::value;
  }
}

int64_t IntegerAt(PyObject* tuple, Py_ssize_t index) {
  const int64_t value = PyLong_AsLongLong(PyTuple_GetItem(tuple, index));
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

[[noreturn]] void NoArray(const char* name, nb::handle object) {
  throw nb::type_error((std::string(name) + " is of type " + TypeName(object) +
                        "; it must be a dense array on the CPU that offers "
                        "__dlpack__")
                           .c_str());
}

[[noreturn]] void WrongDevice(const char* name, int device_type) {
  std::ostringstream sentence;
  sentence << name << " is not on the CPU (DLPack device type " << device_type
           << (device_type == nb::device::cuda::value ? ", CUDA" : "")
           << "): it must be copied to the CPU first, where fa2 computes";
  throw nb::type_error(sentence.str().c_str());
}

}  // namespace

Layout ParseLayout(const std::string& layout) {
  if (layout == "bhsd") return Layout::kBHSD;
  if (layout == "bshd") return Layout::kBSHD;
  if (layout == "thd") return Layout::kTHD;
  throw nb::value_error(
      ("layout is \"" + layout + "\"; it must be \"bhsd\", \"bshd\" or \"thd\"")
          .c_str());
}

InputArray::InputArray(const char* name, nb::handle object) : name_(name) {
  if (object.is_none()) return;
  const void* data = nullptr;
  if (PyTuple_Check(object.ptr())) {
    data = TakeDescriptor(object.ptr());
  } else {
    data = TakeArray(object);
  }
  SetData(data);
}

InputArray InputArray::OfTensor(const char* name, nb::handle object) {
  std::optional<InputArray> array = IfTensor(name, object);
  return array.has_value() ? *std::move(array) : InputArray(name, object);
}

std::optional<InputArray> InputArray::IfTensor(const char* name,
                                               nb::handle object) {
  if (!UsesTensorExchange()) {
    if (!PyTuple_Check(object.ptr())) return std::nullopt;
    return InputArray(name, object);
  }
  InputArray array(name);
  ExchangedTensor tensor;
  if (object.is_none() || !ReadTensor(object, &tensor) ||
      tensor.device_type != nb::device::cpu::value) {
    return std::nullopt;
  }
  const nb::dlpack::dtype dtype{tensor.dtype.code, tensor.dtype.bits,
                                tensor.dtype.lanes};
  if (!ParseDType(dtype, &array.view_.dtype)) return std::nullopt;
  // A framework that has tensors of bf16 means integers by those of uint16.
  if (array.view_.dtype == DType::kBF16 &&
      tensor.dtype.code != static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat))
    return std::nullopt;
  array.shape_.assign(tensor.shape, tensor.shape + tensor.ndim);
  array.strides_.assign(tensor.strides, tensor.strides + tensor.ndim);
  array.SetData(static_cast<const char*>(tensor.data) + tensor.byte_offset);
  return array;
}

bool InputArray::contiguous() const {
  int64_t dense = 1;
  for (size_t i = shape_.size(); i-- > 0;) {
    if (strides_[i] != dense) return false;
    dense *= shape_[i];
  }
  return true;
}

void InputArray::SetData(const void* data) {
  const bool empty = std::find(shape_.begin(), shape_.end(), 0) != shape_.end();
  // Where no stride is ever taken, libraries say different things; dense ones
  // pass every check for contiguous rows.
  int64_t dense = 1;
  for (size_t i = shape_.size(); i-- > 0;) {
    if (empty || shape_[i] == 1) strides_[i] = dense;
    dense *= shape_[i];
  }
  view_.data = empty ? g_no_elements : data;
}

// (address, DType, shape, strides in elements, …): a tensor of PyTorch in a
// third of the time that DLPack takes. Whoever calls keeps it alive.
const void* InputArray::TakeDescriptor(PyObject* descriptor) {
  view_.dtype = static_cast<DType>(IntegerAt(descriptor, 1));
  PyObject* const shape = PyTuple_GetItem(descriptor, 2);
  PyObject* const strides = PyTuple_GetItem(descriptor, 3);
  const Py_ssize_t rank = PyTuple_Size(shape);
  for (Py_ssize_t i = 0; i < rank; ++i) {
    shape_.push_back(IntegerAt(shape, i));
    strides_.push_back(IntegerAt(strides, i));
  }
  return PyLong_AsVoidPtr(PyTuple_GetItem(descriptor, 0));
}

const void* InputArray::TakeArray(nb::handle object) {
  bool taken = false;
  try {
    taken = nb::try_cast(object, array_);
  } catch (const std::exception&) {
    // What a library throws where it cannot export says less than NoArray.
    PyErr_Clear();
  }
  if (!taken) {
    const int device_type = DeviceType(object);
    if (device_type != nb::device::cpu::value) WrongDevice(name_, device_type);
    NoArray(name_, object);
  }
  if (array_.device_type() != nb::device::cpu::value) {
    WrongDevice(name_, array_.device_type());
  }
  if (!ParseDType(array_.dtype(), &view_.dtype)) {
    std::ostringstream sentence;
    sentence << name_ << " has elements of DLPack type code "
             << int{array_.dtype().code} << " with " << int{array_.dtype().bits}
             << " bits; they must be f32, bf16, f16, f64, bool, i32, i64 or u8";
    throw nb::type_error(sentence.str().c_str());
  }
  for (size_t i = 0; i < array_.ndim(); ++i) {
    shape_.push_back(static_cast<int64_t>(array_.shape(i)));
    strides_.push_back(array_.stride(i));
  }
  return array_.data();
}

void InputArray::WrongRank(const char* wanted) const {
  std::ostringstream sentence;
  sentence << name_ << " has shape (";
  for (size_t i = 0; i < shape_.size(); ++i) {
    sentence << (i ? ", " : "") << shape_[i];
  }
  sentence << (shape_.size() == 1 ? ",)" : ")") << "; it must be " << wanted;
  throw nb::value_error(sentence.str().c_str());
}

// dims[i] is the dimension of the array that becomes dimension i of the view,
// -1 a dimension of size 1.
ConstTensorView InputArray::View(const std::array<int, 4>& dims) const {
  ConstTensorView view = view_;
  for (size_t i = 0; i < 4; ++i) {
    const bool own = dims[i] >= 0;
    view.sizes[i] = own ? shape_[static_cast<size_t>(dims[i])] : 1;
    view.strides[i] = own ? strides_[static_cast<size_t>(dims[i])] : 0;
  }
  return view;
}

ConstTensorView InputArray::Tensor(Layout layout) const {
  if (!given()) return {};
  if (layout == Layout::kTHD) {
    if (shape_.size() != 3) WrongRank("[total, heads, head_dim] (layout thd)");
    return View({-1, 1, 0, 2});
  }
  if (layout == Layout::kBSHD) {
    if (shape_.size() != 4) {
      WrongRank("[batch, sequence, heads, head_dim] (layout bshd)");
    }
    return View({0, 2, 1, 3});
  }
  if (shape_.size() != 4) {
    WrongRank("[batch, heads, sequence, head_dim] (layout bhsd)");
  }
  return View({0, 1, 2, 3});
}

ConstTensorView InputArray::RowValues(Layout layout) const {
  if (!given()) return {};
  if (layout == Layout::kTHD && shape_.size() == 2) return View({-1, 0, 1, -1});
  if (shape_.size() != 3) {
    WrongRank(layout == Layout::kTHD
                  ? "[heads, total] or [sequences, heads, longest]"
                  : "[batch, heads, sequence]");
  }
  return View({0, 1, 2, -1});
}

ConstTensorView InputArray::Leading() const {
  if (!given()) return {};
  if (shape_.size() > 4) WrongRank("of at most 4 dimensions");
  std::array<int, 4> dims = {-1, -1, -1, -1};
  for (size_t i = 0; i < shape_.size(); ++i) {
    dims[4 - shape_.size() + i] = static_cast<int>(i);
  }
  return View(dims);
}

ConstTensorView InputArray::PerHead() const {
  if (!given()) return {};
  if (shape_.size() == 1) return View({-1, 0, -1, -1});
  if (shape_.size() != 2) WrongRank("[heads] or [batch, heads]");
  return View({0, 1, -1, -1});
}

ConstTensorView InputArray::Vector() const {
  if (!given()) return {};
  if (shape_.size() != 1) WrongRank("of one dimension");
  return View({-1, -1, -1, 0});
}

OutputArray::OutputArray(const char* name, nb::handle object)
    : array_(name, object) {}

OutputArray OutputArray::OfTensor(const char* name, nb::handle object) {
  return OutputArray(InputArray::OfTensor(name, object));
}

TensorView OutputArray::Writable(const ConstTensorView& view) {
  return {const_cast<void*>(view.data), view.dtype, view.sizes, view.strides};
}
TensorView OutputArray::Tensor(Layout layout) const {
  return Writable(array_.Tensor(layout));
}
TensorView OutputArray::RowValues(Layout layout) const {
  return Writable(array_.RowValues(layout));
}
TensorView OutputArray::Leading() const { return Writable(array_.Leading()); }
TensorView OutputArray::PerHead() const { return Writable(array_.PerHead()); }
TensorView OutputArray::Vector() const { return Writable(array_.Vector()); }

}  // namespace fa2::python
