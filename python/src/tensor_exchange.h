// SPDX-License-Identifier: Apache-2.0

// A framework's tensors read by its table of C functions for DLPack: no call
// into Python, no export that has to be given back.
#ifndef FA2_PYTHON_SRC_TENSOR_EXCHANGE_H_
#define FA2_PYTHON_SRC_TENSOR_EXCHANGE_H_

#include <nanobind/nanobind.h>

#include <cstdint>

namespace fa2::python {

// DLPack's DLTensor. `shape` and `strides` are the tensor's own arrays.
struct ExchangedTensor {
  void* data = nullptr;
  int32_t device_type = 0;
  int32_t device_id = 0;
  int32_t ndim = 0;
  struct {
    uint8_t code = 0, bits = 0;
    uint16_t lanes = 0;
  } dtype;
  int64_t* shape = nullptr;
  int64_t* strides = nullptr;  // in elements
  uint64_t byte_offset = 0;
};

// From now on ReadTensor reads objects of these two types. Returns whether it
// can: the first has a table of a version that is known.
bool UseTensorExchange(nanobind::handle tensor_type,
                       nanobind::handle parameter_type);

// Whether UseTensorExchange has found a table.
bool UsesTensorExchange();

// Fills *tensor, which is valid as long as the object is; false where that
// cannot be read here, without an exception: another type, derived ones too, a
// tensor without memory that strides describe.
bool ReadTensor(nanobind::handle object, ExchangedTensor* tensor);

}  // namespace fa2::python

#endif  // FA2_PYTHON_SRC_TENSOR_EXCHANGE_H_
