// SPDX-License-Identifier: Apache-2.0

// What every entry point of another kernel checks in its own arguments before
// it speaks of them as tensors.
#ifndef FA2_SRC_COMPAT_CHECKS_H_
#define FA2_SRC_COMPAT_CHECKS_H_

#include <cstdint>
#include <string>

#include "fa2/status.h"
#include "fa2/types.h"

namespace fa2::compat {

inline Status Invalid(const std::string& argument, const std::string& is,
                      const std::string& must_be) {
  return Status::InvalidArgument(argument + " is " + is + "; it must be " +
                                 must_be);
}

// A pointer to elements of `dtype`: given, unless there are none (`empty`), and
// on an element's boundary.
inline Status CheckPointer(const char* name, const void* data, DType dtype,
                           bool empty = false) {
  const size_t size = SizeOf(dtype);
  if (empty) return Status::Ok();
  if (data == nullptr) {
    return Status::InvalidArgument(std::string(name) +
                                   " is NULL; it must point to " +
                                   NameOf(dtype) + " elements");
  }
  const size_t past = reinterpret_cast<uintptr_t>(data) % size;
  if (past != 0) {
    return Status::InvalidArgument(
        std::string(name) + " is misaligned by " + std::to_string(past) +
        " bytes; it must be a multiple of " + std::to_string(size) +
        ", the bytes of one " + NameOf(dtype));
  }
  return Status::Ok();
}

}  // namespace fa2::compat

#endif  // FA2_SRC_COMPAT_CHECKS_H_
