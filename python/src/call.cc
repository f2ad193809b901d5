// SPDX-License-Identifier: Apache-2.0
#include "python/src/call.h"

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

namespace fa2::python {

namespace nb = nanobind;

void ThrowIfError(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalidArgument:
    case StatusCode::kUnsupported:
      throw nb::value_error(status.message().c_str());
    case StatusCode::kOutOfMemory:
      PyErr_SetString(PyExc_MemoryError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::kInternal:
      break;
  }
  throw std::runtime_error(status.message());
}

Context* ContextFor(std::optional<int> num_threads) {
  if (!num_threads.has_value()) {
    Context* context = nullptr;
    ThrowIfError(Context::Default(&context));
    return context;
  }
  if (*num_threads < 1) {
    throw nb::value_error(("num_threads is " + std::to_string(*num_threads) +
                           "; it must be None or at least 1")
                              .c_str());
  }
  // Kept for the life of the process, as the default context is: a context
  // owns the workspace that later calls reuse.
  static auto* contexts = new std::map<int, std::unique_ptr<Context>>;
  static auto* mutex = new std::mutex;
  const std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<Context>& context = (*contexts)[*num_threads];
  if (context == nullptr) {
    ContextOptions options;
    options.num_threads = *num_threads;
    ThrowIfError(Context::Create(options, &context));
  }
  return context.get();
}

}  // namespace fa2::python
