// SPDX-License-Identifier: Apache-2.0

// The edge between C and C++: statuses become codes and a kept sentence, and
// no exception passes.
#ifndef FA2_SRC_C_API_BOUNDARY_H_
#define FA2_SRC_C_API_BOUNDARY_H_

#include <cstddef>
#include <cstring>
#include <string>

#include "fa2/context.h"
#include "fa2/fa2_c.h"
#include "fa2/status.h"

namespace fa2::c_api {

// Keeps the status's sentence for fa2_last_error and returns its code.
fa2_status Report(const Status& status) noexcept;

// Inside a catch block: the same for the exception being handled.
fa2_status ReportException(const char* function) noexcept;

// Runs the body of a C function, a callable that returns Status.
template <class Body>
fa2_status Guard(const char* function, const Body& body) noexcept {
  try {
    return Report(body());
  } catch (...) {
    return ReportException(function);
  }
}

// Reads the caller's versioned struct of `given_size` bytes (its first field)
// into `to`: fields that an older caller's struct lacks become 0, and a newer
// caller's larger struct must be zero where this library knows no field.
// `least` bytes must be there.
Status ReadStruct(const char* name, const void* from, size_t least,
                  size_t known, void* to);

template <class Struct>
Status ReadStruct(const char* name, const Struct* from, size_t least,
                  Struct* to) {
  Status status = ReadStruct(name, from, least, sizeof(Struct), to);
  if (status.ok()) to->struct_size = sizeof(Struct);
  return status;
}

// The same for a struct with a `reserved` field, which must be 0.
template <class Args>
Status ReadArgs(const Args* given, size_t least, Args* args) {
  Status status = ReadStruct("args", given, least, args);
  if (status.ok() && args->reserved != 0) {
    return Status::InvalidArgument("args.reserved is " +
                                   std::to_string(args->reserved) +
                                   "; it must be 0");
  }
  return status;
}

// The C++ context behind a handle; nullptr (the default one) for NULL.
Context* ToContext(fa2_context* context);

}  // namespace fa2::c_api

#endif  // FA2_SRC_C_API_BOUNDARY_H_
