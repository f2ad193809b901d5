// SPDX-License-Identifier: Apache-2.0

// What every bound function shares: the context for a number of threads, and
// a status as a Python exception.
#ifndef FA2_PYTHON_SRC_CALL_H_
#define FA2_PYTHON_SRC_CALL_H_

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <utility>

#include "fa2/attention.h"
#include "fa2/context.h"
#include "fa2/status.h"

namespace fa2::python {

// Throws ValueError with the status's sentence; MemoryError where memory ran
// out, RuntimeError for a fault of fa2 itself.
void ThrowIfError(const Status& status);

// The default context, or the one kept for that number of threads and that
// pool: "openmp" is for calls beside a framework that runs on OpenMP threads,
// and means oneTBB's where no such runtime is loaded. FA2_POOL decides over it.
Context* ContextFor(std::optional<int> num_threads,
                    const std::optional<std::string>& pool = std::nullopt);

// Throws ValueError for another word than "fast", "high" or "exact".
Precision ParsePrecision(const std::string& precision);

// Runs call() without the GIL and throws if it failed. Arguments must have
// been taken from Python before.
template <class Call>
void RunWithoutGil(Call&& call) {
  Status status;
  {
    const nanobind::gil_scoped_release release;
    status = std::forward<Call>(call)();
  }
  ThrowIfError(status);
}

// Each adds its functions to the module.
void BindAttention(nanobind::module_& module);
void BindPlainAttention(nanobind::module_& module);
void BindTrainingOps(nanobind::module_& module);
void BindVerify(nanobind::module_& module);
void BindXlaFfi(nanobind::module_& module);

}  // namespace fa2::python

#endif  // FA2_PYTHON_SRC_CALL_H_
