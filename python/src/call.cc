// SPDX-License-Identifier: Apache-2.0
#include "python/src/call.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

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

Precision ParsePrecision(const std::string& precision) {
  if (precision == "fast") return Precision::kFast;
  if (precision == "high") return Precision::kHigh;
  if (precision == "exact") return Precision::kExact;
  throw nb::value_error(("precision is \"" + precision +
                         "\"; it must be \"fast\", \"high\" or \"exact\"")
                            .c_str());
}

Context* ContextFor(std::optional<int> num_threads,
                    const std::optional<std::string>& pool) {
  const char* const forced = std::getenv("FA2_POOL");
  const bool choose_pool =
      pool.has_value() && (forced == nullptr || *forced == '\0');
  if (!num_threads.has_value() && !choose_pool) {
    Context* context = nullptr;
    ThrowIfError(Context::Default(&context));
    return context;
  }
  if (num_threads.has_value() && *num_threads < 1) {
    throw nb::value_error(("num_threads is " + std::to_string(*num_threads) +
                           "; it must be None or at least 1")
                              .c_str());
  }
  ContextOptions options;
  options.num_threads = num_threads.value_or(0);
  if (choose_pool) options.pool = *pool;
  // Kept for the life of the process, as the default context is: a context
  // owns the workspace that later calls reuse.
  using Key = std::pair<int, std::string>;
  static auto* contexts = new std::map<Key, std::unique_ptr<Context>>;
  static auto* mutex = new std::mutex;
  const std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<Context>& context =
      (*contexts)[{options.num_threads, options.pool}];
  if (context == nullptr) {
    Status status = Context::Create(options, &context);
    if (status.code() == StatusCode::kUnsupported && options.pool == "openmp") {
      options.pool = "tbb";
      status = Context::Create(options, &context);
    }
    ThrowIfError(status);
  }
  return context.get();
}

}  // namespace fa2::python
