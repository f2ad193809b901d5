// SPDX-License-Identifier: Apache-2.0

// The extension module fa2_cpu._core: thin bindings that write into arrays
// which the Python side allocates. Users call the functions of the package
// fa2_cpu.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/peak/peak.h"
#include "fa2/context.h"
#include "fa2/types.h"
#include "python/src/array.h"
#include "python/src/call.h"

namespace fa2::python {
namespace {

// What a call computes with, as a dict of plain values.
nb::dict Info(std::optional<int> num_threads,
              const std::optional<std::string>& pool) {
  const ContextInfo info = ContextFor(num_threads, pool)->Info();
  nb::dict dict;
  dict["threads"] = info.num_threads;
  dict["pool"] = info.pool;
  dict["target"] = info.target;
  dict["engine"] = info.engine;
  dict["targets"] = info.targets;
  dict["engines"] = info.engines;
  return dict;
}

// Of the unit behind an engine, or behind that of bf16 where none is named.
// None where it cannot be measured.
std::optional<double> MeasurePeak(std::optional<int> num_threads,
                                  const std::optional<std::string>& engine) {
  const ContextInfo info = ContextFor(num_threads)->Info();
  double flops = 0;
  RunWithoutGil([&] {
    flops = peak::MeasurePeak(peak::UnitOfEngine(engine.value_or(info.engine)),
                              info.num_threads, info.target);
    return Status::Ok();
  });
  return flops > 0 ? std::optional<double>(flops) : std::nullopt;
}

// dtype and shape of any array on the CPU.
std::pair<std::string, std::vector<int64_t>> Describe(nb::handle array,
                                                      const std::string& name) {
  const InputArray input(name.c_str(), array);
  return {NameOf(input.dtype()), input.shape()};
}

}  // namespace
}  // namespace fa2::python

NB_MODULE(_core, module) {
  using namespace nanobind::literals;  // NOLINT: the argument names
  module.attr("__version__") = FA2_VERSION;
  module.def("info", &fa2::python::Info, "num_threads"_a = nanobind::none(),
             "pool"_a = nanobind::none());
  module.def("measure_peak", &fa2::python::MeasurePeak,
             "num_threads"_a = nanobind::none(), "engine"_a = nanobind::none());
  module.def("describe", &fa2::python::Describe, "array"_a, "name"_a);
  // Numbers of the element types in descriptors of arrays (array.h).
  nanobind::dict dtypes;
  for (const fa2::DType dtype :
       {fa2::DType::kF32, fa2::DType::kBF16, fa2::DType::kF16, fa2::DType::kF64,
        fa2::DType::kBool, fa2::DType::kI32, fa2::DType::kI64,
        fa2::DType::kU8}) {
    dtypes[NameOf(dtype)] = static_cast<int>(dtype);
  }
  module.attr("dtype_numbers") = dtypes;
  fa2::python::BindAttention(module);
  fa2::python::BindPlainAttention(module);
  fa2::python::BindTrainingOps(module);
#ifdef FA2_PYTHON_VERIFY
  fa2::python::BindVerify(module);
#endif
#ifdef FA2_PYTHON_XLA_FFI
  fa2::python::BindXlaFfi(module);
#endif
}
