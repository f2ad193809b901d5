// SPDX-License-Identifier: Apache-2.0
#include "src/c_api/boundary.h"

#include <algorithm>
#include <exception>
#include <new>

#include "fa2/version.h"

namespace fa2::c_api {
namespace {

// A plain array: keeping a sentence must work when memory has run out, and a
// thread's end must not depend on a destructor in a library that may be gone.
constexpr size_t kMessageBytes = 1024;
thread_local char t_message[kMessageBytes] = "";

void Keep(const char* message) noexcept {
  const size_t length = std::min(std::strlen(message), kMessageBytes - 1);
  std::memcpy(t_message, message, length);
  t_message[length] = '\0';
}

// Larger than any struct of any version will be: a struct_size beyond it is
// memory that nobody has set.
constexpr size_t kMaxStructBytes = 65536;

}  // namespace

static_assert(static_cast<int>(StatusCode::kOk) == FA2_OK);
static_assert(static_cast<int>(StatusCode::kInvalidArgument) ==
              FA2_INVALID_ARGUMENT);
static_assert(static_cast<int>(StatusCode::kOutOfMemory) == FA2_OUT_OF_MEMORY);
static_assert(static_cast<int>(StatusCode::kUnsupported) == FA2_UNSUPPORTED);
static_assert(static_cast<int>(StatusCode::kInternal) == FA2_INTERNAL);
static_assert(sizeof(fa2_status) == 4);

fa2_status Report(const Status& status) noexcept {
  Keep(status.message().c_str());
  return static_cast<fa2_status>(status.code());
}

fa2_status ReportException(const char* function) noexcept {
  char message[kMessageBytes] = "";
  const auto append = [&message](const char* text) {
    std::strncat(message, text, kMessageBytes - 1 - std::strlen(message));
  };
  fa2_status status = FA2_INTERNAL;
  append(function);
  try {
    throw;
  } catch (const std::bad_alloc&) {
    status = FA2_OUT_OF_MEMORY;
    append(": the system has no memory left");
  } catch (const std::exception& error) {
    append(": ");
    append(error.what());
  } catch (...) {
    append(": an exception of unknown type");
  }
  Keep(message);
  return status;
}

Status ReadStruct(const char* name, const void* from, size_t least,
                  size_t known, void* to) {
  if (from == nullptr) {
    return Status::InvalidArgument(std::string(name) +
                                   " is NULL; it must point to a struct");
  }
  size_t given = 0;
  std::memcpy(&given, from, sizeof(given));
  if (given < least || given > kMaxStructBytes || given % sizeof(size_t) != 0) {
    return Status::InvalidArgument(
        std::string(name) + ".struct_size is " + std::to_string(given) +
        "; it must be sizeof(the struct), which is " + std::to_string(known) +
        " in this version and at least " + std::to_string(least) +
        " in any, in steps of " + std::to_string(sizeof(size_t)));
  }
  const char* bytes = static_cast<const char*>(from);
  const bool tail_is_zero =
      given <= known || std::all_of(bytes + known, bytes + given,
                                    [](char byte) { return byte == 0; });
  if (!tail_is_zero) {
    return Status::Unsupported(
        std::string(name) + ".struct_size is " + std::to_string(given) +
        " with fields set beyond the " + std::to_string(known) +
        " bytes that fa2 " + fa2_version_string() +
        " knows; they must be 0, or the library newer");
  }
  std::memset(to, 0, known);
  std::memcpy(to, from, std::min(given, known));
  return Status::Ok();
}

}  // namespace fa2::c_api

extern "C" {

const char* fa2_last_error(void) { return fa2::c_api::t_message; }

const char* fa2_status_string(fa2_status status) {
  switch (status) {
    case FA2_OK:
      return "ok";
    case FA2_INVALID_ARGUMENT:
      return "invalid argument";
    case FA2_OUT_OF_MEMORY:
      return "out of memory";
    case FA2_UNSUPPORTED:
      return "unsupported";
    case FA2_INTERNAL:
      return "internal error";
  }
  return "unknown status";
}

const char* fa2_version_string(void) { return fa2::Version(); }

uint32_t fa2_version(void) {
  static_assert(FA2_VERSION_MINOR < 1000 && FA2_VERSION_PATCH < 1000);
  return FA2_VERSION_MAJOR * 1000000u + FA2_VERSION_MINOR * 1000u +
         FA2_VERSION_PATCH;
}

}  // extern "C"
