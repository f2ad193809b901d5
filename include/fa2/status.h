// SPDX-License-Identifier: Apache-2.0

// The result of every fa2 call: ok, or a code and one sentence that names the
// argument, what it is and what it must be.
#ifndef FA2_STATUS_H_
#define FA2_STATUS_H_

#include <string>
#include <utility>

namespace fa2 {

enum class StatusCode : int {
  kOk = 0,
  // The caller's arguments do not fit each other or the function.
  kInvalidArgument = 1,
  // Memory could not be had, or workspace is over the context's limit.
  kOutOfMemory = 2,
  // A combination, target or engine that this build or CPU lacks.
  kUnsupported = 3,
  // A fault of fa2 itself.
  kInternal = 4,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message)
      : code_(code), message_(std::move(message)) {}

  static Status Ok() { return Status(); }
  static Status InvalidArgument(std::string message) {
    return Status(StatusCode::kInvalidArgument, std::move(message));
  }
  static Status OutOfMemory(std::string message) {
    return Status(StatusCode::kOutOfMemory, std::move(message));
  }
  static Status Unsupported(std::string message) {
    return Status(StatusCode::kUnsupported, std::move(message));
  }
  static Status Internal(std::string message) {
    return Status(StatusCode::kInternal, std::move(message));
  }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  // Empty when ok.
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace fa2

#endif  // FA2_STATUS_H_
