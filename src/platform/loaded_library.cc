// SPDX-License-Identifier: Apache-2.0
#include "src/platform/loaded_library.h"

#if defined(__unix__) || defined(__APPLE__)

#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <vector>

#if defined(__APPLE__)
#include <mach-o/dyld.h>
#else
#include <link.h>
#endif

namespace fa2::platform {
namespace {

// Of all shared objects, in the order in which they were loaded.
std::vector<std::string> LoadedPaths() {
  std::vector<std::string> paths;
#if defined(__APPLE__)
  for (uint32_t i = 0; i < _dyld_image_count(); ++i) {
    const char* const path = _dyld_get_image_name(i);
    if (path != nullptr) paths.emplace_back(path);
  }
#else
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        if (info->dlpi_name != nullptr) {
          static_cast<std::vector<std::string>*>(out)->emplace_back(
              info->dlpi_name);
        }
        return 0;
      },
      &paths);
#endif
  return paths;
}

std::string FileName(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

}  // namespace

LoadedLibrary LoadedLibrary::With(const char* symbol,
                                  std::initializer_list<const char*> names) {
  LoadedLibrary library;
  library.handle_ = RTLD_DEFAULT;
  library.found_ = dlsym(RTLD_DEFAULT, symbol) != nullptr;
  if (library.found_) return library;
  const std::vector<std::string> paths = LoadedPaths();
  for (const char* const name : names) {
    for (const std::string& path : paths) {
      if (FileName(path).rfind(name, 0) != 0) continue;
      void* const handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
      if (handle == nullptr) continue;
      if (dlsym(handle, symbol) != nullptr) {
        library.found_ = true;
        library.handle_ = handle;
        return library;
      }
      dlclose(handle);
    }
  }
  return library;
}

void* LoadedLibrary::Find(const char* symbol) const {
  return found_ ? dlsym(handle_, symbol) : nullptr;
}

}  // namespace fa2::platform

#else

namespace fa2::platform {

LoadedLibrary LoadedLibrary::With(const char*,
                                  std::initializer_list<const char*>) {
  return LoadedLibrary();
}

void* LoadedLibrary::Find(const char*) const { return nullptr; }

}  // namespace fa2::platform

#endif
