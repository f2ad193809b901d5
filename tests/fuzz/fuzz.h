// SPDX-License-Identifier: Apache-2.0

// What the fuzz targets share. Each defines
//   extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// for libFuzzer, or for replay_main.cc.
#ifndef FA2_TESTS_FUZZ_FUZZ_H_
#define FA2_TESTS_FUZZ_FUZZ_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "fa2/context.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace fa2::test {

// Says what is wrong and ends the process, which keeps the input.
[[noreturn]] inline void Fail(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::abort();
}

// Contexts that must give the same bits, on one target and engine.
struct ContextGroup {
  std::string name;
  Context* one = nullptr;         // thread
  std::vector<Context*> several;  // 3 and 16, and 3 of the program's own

  // The one and, so that executions are many, one of the several.
  std::vector<Context*> Two(int64_t which) const {
    return {one, several[static_cast<size_t>(which) % several.size()]};
  }
};

// One for every target of this build and CPU, and for every engine of the best
// target. Made on the first call.
const std::vector<ContextGroup>& ContextGroups();

}  // namespace fa2::test

#endif  // FA2_TESTS_FUZZ_FUZZ_H_
