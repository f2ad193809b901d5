// SPDX-License-Identifier: Apache-2.0
#include "python/src/tensor_exchange.h"

namespace fa2::python {
namespace {

namespace nb = nanobind;

// What dlpack.h calls DLPackExchangeAPI, from DLPack 1.2 on; all but the last
// function are not used here.
struct ExchangeTable {
  struct {
    uint32_t major, minor;
  } version;
  void* previous;
  void *allocate, *from_object, *to_object;
  int (*read)(void* object, ExchangedTensor* tensor);
};
constexpr uint32_t kKnownMajor = 1;

// One framework's. Written while the module of that framework is imported.
PyTypeObject* g_types[2] = {nullptr, nullptr};
int (*g_read)(void* object, ExchangedTensor* tensor) = nullptr;

}  // namespace

bool UseTensorExchange(nb::handle tensor_type, nb::handle parameter_type) {
  for (const char* name :
       {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"}) {
    if (!nb::hasattr(tensor_type, name)) continue;
    const nb::object capsule = tensor_type.attr(name);
    const auto* const table = static_cast<const ExchangeTable*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) {
      PyErr_Clear();
      continue;
    }
    if (table->version.major != kKnownMajor || table->read == nullptr) continue;
    // Kept for the life of the process.
    g_types[0] = reinterpret_cast<PyTypeObject*>(tensor_type.inc_ref().ptr());
    g_types[1] =
        reinterpret_cast<PyTypeObject*>(parameter_type.inc_ref().ptr());
    g_read = table->read;
    return true;
  }
  return false;
}

bool UsesTensorExchange() { return g_read != nullptr; }

bool ReadTensor(nb::handle object, ExchangedTensor* tensor) {
  if (g_read == nullptr) return false;
  PyTypeObject* const type = Py_TYPE(object.ptr());
  if (type != g_types[0] && type != g_types[1]) return false;
  if (g_read(object.ptr(), tensor) == 0) return true;
  PyErr_Clear();
  return false;
}

}  // namespace fa2::python
