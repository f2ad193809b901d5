// SPDX-License-Identifier: Apache-2.0

// Functions of libraries that others have loaded into the process.
#ifndef FA2_SRC_PLATFORM_LOADED_LIBRARY_H_
#define FA2_SRC_PLATFORM_LOADED_LIBRARY_H_

#include <initializer_list>

namespace fa2::platform {

class LoadedLibrary {
 public:
  // The library that defines `symbol`: what the whole process sees (the
  // program, what it links to, what is preloaded), else the first library,
  // with what it links to, whose file name begins with one of `names`, earlier
  // names first. Loads nothing; what is found stays loaded.
  static LoadedLibrary With(const char* symbol,
                            std::initializer_list<const char*> names);

  // Leaves *function as it is where there is no such symbol.
  template <class Function>
  void Find(const char* symbol, Function** function) const {
    if (void* const found = Find(symbol)) {
      *function = reinterpret_cast<Function*>(found);
    }
  }

 private:
  void* Find(const char* symbol) const;  // nullptr: none

  bool found_ = false;
  void* handle_ = nullptr;
};

}  // namespace fa2::platform

#endif  // FA2_SRC_PLATFORM_LOADED_LIBRARY_H_
